# Triton types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What begins and ends a forward, one program per row: embedding, the MTP head's inputs, the best token."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.backends.gpu.kernels.launch import INTERPRETED, check, dependent
from stoker.backends.gpu.kernels.linear import Best, Stream
from stoker.backends.gpu.kernels.products import wait_for_inputs
from stoker.backends.gpu.packed import UNIT

BEST_BLOCK = 16384  # few rounds: each waits for memory once
FUSION: dict[str, bool] = {} if INTERPRETED else {"enable_fp_fusion": False}


@dataclass(frozen=True)
class MtpNorms:
    """fp32 [H] each, the offset added."""

    last: Tensor  # of the network that made the hidden state
    hidden: Tensor  # pre_fc_norm_hidden
    embedding: Tensor  # pre_fc_norm_embedding
    eps: float


@triton.jit
def begin_kernel(
    ids_ptr, table_ptr, x_ptr, next_scale_ptr, scaled_ptr, squares_ptr, EMBED: tl.constexpr, H: tl.constexpr,
    UNITS_PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program t: row t of the stream, from the embedding or as it stands; times a norm's weight; its squares."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    unit = tl.arange(0, UNITS_PADDED)
    c = unit[:, None] * 16 + tl.arange(0, 16)[None, :]
    ok = c < H
    if EMBED:
        token = tl.load(ids_ptr + row).to(tl.int64)
        x = tl.load(table_ptr + token * H + c, mask=ok, other=0.0)
        tl.store(x_ptr + row * H + c, x, mask=ok)
    else:
        x = tl.load(x_ptr + row * H + c, mask=ok, other=0.0)
    value = x.to(tl.float32)
    scale = tl.load(next_scale_ptr + c, mask=ok, other=0.0)
    tl.store(scaled_ptr + row * H + c, (value * scale).to(scaled_ptr.dtype.element_ty), mask=ok)
    tl.store(squares_ptr + row * (H // 16) + unit, tl.sum(value * value, 1), mask=unit * 16 < H)


@triton.jit
def _normed(x, scale_ptr, c, ok, H: tl.constexpr, EPS: tl.constexpr):
    return x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / H + EPS)) * tl.load(scale_ptr + c, mask=ok, other=0.0)


@triton.jit
def mtp_inputs_kernel(
    ids_ptr, table_ptr, x_ptr, last_ptr, hidden_ptr, embedding_ptr, joined_ptr, H: tl.constexpr,
    PADDED: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program t: norm(embedding of token t), then norm(last norm(x)), side by side."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    c = tl.arange(0, PADDED)
    ok = c < H
    kind = joined_ptr.dtype.element_ty
    token = tl.load(ids_ptr + row).to(tl.int64)
    embedded = tl.load(table_ptr + token * H + c, mask=ok, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * H + c, mask=ok, other=0.0).to(tl.float32)
    hidden = _normed(x, last_ptr, c, ok, H, EPS).to(kind).to(tl.float32)
    joined_ptr += row * (2 * H)
    tl.store(joined_ptr + c, _normed(embedded, embedding_ptr, c, ok, H, EPS).to(kind), mask=ok)
    tl.store(joined_ptr + H + c, _normed(hidden, hidden_ptr, c, ok, H, EPS).to(kind), mask=ok)


@triton.jit
def best_kernel(values_ptr, rows_ptr, tokens_ptr, COUNT: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """Program t: the token with the largest logit of row t, the lowest of several."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    index = tl.full((BLOCK,), VOCAB - 1, tl.int32)  # where all are NaN; what follows must stay in bounds
    for start in range(0, COUNT, BLOCK):
        ok = start + i < COUNT
        value = tl.load(values_ptr + row * COUNT + start + i, mask=ok, other=float("-inf"))
        token = tl.load(rows_ptr + row * COUNT + start + i, mask=ok, other=VOCAB - 1)
        better = value > best
        best = tl.where(better, value, best)
        index = tl.where(better, token, index)
    top = tl.max(best, 0)
    tl.store(tokens_ptr + row, tl.min(tl.where(best == top, index, VOCAB - 1), 0))


def begin(stream: Stream, squares: Tensor, ids: Tensor | None, table: Tensor | None, pdl: bool = False) -> None:
    """Fills `stream.x` from `table` [vocab, H] at `ids` [T] int32, or takes it as it is; then the other two."""
    tokens, hidden = stream.x.shape
    check("stream.x", stream.x, (tokens, hidden), torch.bfloat16, stream.x)
    check("stream.scaled", stream.scaled, (tokens, hidden), torch.bfloat16, stream.x)
    check("stream.next_scale", stream.next_scale, (hidden,), torch.float32, stream.x)
    check("squares", squares, (tokens, hidden // UNIT), torch.float32, stream.x)
    if (ids is None) != (table is None):
        raise ValueError("ids and table belong together: give both or none.")
    if ids is not None and table is not None:
        check("ids", ids, (tokens,), torch.int32, stream.x)
        check("table", table, (None, hidden), torch.bfloat16, stream.x)
    begin_kernel[(tokens,)](
        stream.x if ids is None else ids, stream.x if table is None else table, stream.x, stream.next_scale,
        stream.scaled, squares, EMBED=ids is not None, H=hidden,
        UNITS_PADDED=triton.next_power_of_2(hidden // UNIT), num_warps=4, **FUSION,
        **dependent(stream.x.device, pdl),
    )  # fmt: skip


def mtp_inputs(ids: Tensor, table: Tensor, x: Tensor, norms: MtpNorms, joined: Tensor, pdl: bool = False) -> None:
    """joined [T, 2 H] bf16 from the tokens that follow, `ids` [T] int32, and the stream x [T, H] of those before."""
    tokens, hidden = x.shape
    check("x", x, (tokens, hidden), torch.bfloat16, x)
    check("ids", ids, (tokens,), torch.int32, x)
    check("table", table, (None, hidden), torch.bfloat16, x)
    check("joined", joined, (tokens, 2 * hidden), torch.bfloat16, x)
    for name in ("last", "hidden", "embedding"):
        check(f"norms.{name}", getattr(norms, name), (hidden,), torch.float32, x)
    mtp_inputs_kernel[(tokens,)](
        ids, table, x, norms.last, norms.hidden, norms.embedding, joined, H=hidden,
        PADDED=triton.next_power_of_2(hidden), EPS=norms.eps, num_warps=4, **FUSION, **dependent(x.device, pdl),
    )  # fmt: skip


def best_tokens(best: Best, vocab: int, tokens: Tensor, pdl: bool = False) -> None:
    """tokens [T] int32: the argmax over the head's blocks."""
    rows, count = best.values.shape
    check("tokens", tokens, (rows,), torch.int32, best.values)
    best_kernel[(rows,)](
        best.values, best.rows, tokens, COUNT=count, VOCAB=vocab, BLOCK=BEST_BLOCK, num_warps=16, **FUSION,
        **dependent(tokens.device, pdl),
    )  # fmt: skip
