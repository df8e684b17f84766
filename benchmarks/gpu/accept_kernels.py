# Triton types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Drafts that agree with the model's choices, and the inputs of the next step: one program per sequence."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.backends.gpu.kernels.launch import check, dependent
from stoker.backends.gpu.kernels.products import wait_for_inputs
from stoker.backends.gpu.kernels.rows import FUSION


@triton.jit
def accept_kernel(
    ids_ptr, chosen_ptr, assumed_ptr, counts_ptr, tokens_ptr, last_ptr, ROWS: tl.constexpr, PADDED: tl.constexpr,
    ASSUMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program b: tokens gained are the choices up to the first that the draft after it is not."""
    wait_for_inputs(PDL)
    b = tl.program_id(0)
    i = tl.arange(0, PADDED)
    chosen = tl.load(chosen_ptr + b * ROWS + i, mask=i < ROWS, other=0)
    tl.store(tokens_ptr + b * ROWS + i, chosen, mask=i < ROWS)
    if ASSUMED:
        count = tl.load(assumed_ptr + b)
    else:
        draft = tl.load(ids_ptr + b * ROWS + 1 + i, mask=i < ROWS - 1, other=-1)
        count = tl.min(tl.where((i < ROWS - 1) & (draft == chosen), ROWS, i), 0) + 1
    tl.store(counts_ptr + b, count)
    tl.store(last_ptr + b, (b * ROWS - 1 + count).to(tl.int64))


@triton.jit(do_not_specialize=["sequence_step", "draft_step"])
def advance_kernel(
    counts_ptr, tokens_ptr, drafts_ptr, ids_ptr, cached_ptr, replay_ptr, sequence_step, draft_step,
    ROWS: tl.constexpr, PADDED: tl.constexpr, DRAFTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program b: the sequence is longer by its count, and its next rows are the newest token and the drafts."""
    wait_for_inputs(PDL)
    b = tl.program_id(0)
    count = tl.load(counts_ptr + b)
    tl.store(cached_ptr + b, tl.load(cached_ptr + b) + count)
    tl.store(replay_ptr + b, count)
    tl.store(ids_ptr + b * ROWS, tl.load(tokens_ptr + b * ROWS + count - 1))
    if DRAFTS:
        i = tl.arange(0, PADDED)
        draft = tl.load(drafts_ptr + b * sequence_step + i * draft_step, mask=i < ROWS - 1, other=0)
        tl.store(ids_ptr + b * ROWS + 1 + i, draft, mask=i < ROWS - 1)


def accept_drafts(
    ids: Tensor, chosen: Tensor, counts: Tensor, tokens: Tensor, last_rows: Tensor, assumed: Tensor | None,
    pdl: bool = False,
) -> None:  # fmt: skip
    """Of `ids` [B, rows], newest token and drafts, and the choices [B, rows] after each: `counts` [B] tokens gained,
    `tokens` [B, rows] of which they are the first, and `last_rows` [B], the row of the last accepted one; all int32 but
    `last_rows`. `assumed` [B] is taken for the counts instead."""
    batch, rows = ids.shape
    for name, tensor in (("ids", ids), ("chosen", chosen), ("tokens", tokens)):
        check(name, tensor, (batch, rows), torch.int32, ids)
    check("counts", counts, (batch,), torch.int32, ids)
    check("last_rows", last_rows, (batch,), torch.int64, ids)
    if assumed is not None:
        check("assumed", assumed, (batch,), torch.int32, ids)
    accept_kernel[(batch,)](
        ids, chosen, counts if assumed is None else assumed, counts, tokens, last_rows, ROWS=rows,
        PADDED=triton.next_power_of_2(rows), ASSUMED=assumed is not None, num_warps=1, **FUSION,
        **dependent(ids.device, pdl),
    )  # fmt: skip


def advance_inputs(
    counts: Tensor, tokens: Tensor, drafts: Tensor | None, ids: Tensor, cached: Tensor, replay: Tensor,
    pdl: bool = False,
) -> None:  # fmt: skip
    """`ids` [B, rows], `cached` [B] and `replay` [B] of the step after one that gained the first `counts` of `tokens`;
    `drafts` [B, rows - 1], with any strides, follow the newest. All int32."""
    batch, rows = ids.shape
    for name, tensor in (("ids", ids), ("tokens", tokens)):
        check(name, tensor, (batch, rows), torch.int32, ids)
    for name, tensor in (("counts", counts), ("cached", cached), ("replay", replay)):
        check(name, tensor, (batch,), torch.int32, ids)
    if drafts is not None and (drafts.shape != (batch, rows - 1) or drafts.dtype != torch.int32):
        raise ValueError(f"drafts must be [{batch}, {rows - 1}] int32, found {list(drafts.shape)} {drafts.dtype}.")
    steps = (0, 0) if drafts is None else drafts.stride()
    advance_kernel[(batch,)](
        counts, tokens, tokens if drafts is None else drafts, ids, cached, replay, *steps, ROWS=rows,
        PADDED=triton.next_power_of_2(rows), DRAFTS=drafts is not None, num_warps=1, **FUSION,
        **dependent(ids.device, pdl),
    )  # fmt: skip
