# Triton types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
"""What lies between the products of a prompt, row by row: embedding, norms, choice of experts, their sum."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.backends.gpu.kernels.launch import INTERPRETED, check
from stoker.backends.gpu.kernels.prefill_experts import FUSION, operand_column

CHOSEN = 32 if INTERPRETED else 8  # rows whose experts one program chooses
ROWS = 32 if INTERPRETED else 1  # of a program; the interpreter's time goes by programs


@dataclass(frozen=True)
class Choice:
    """Experts of T tokens, as in `Routing`."""

    experts: Tensor  # [T, top_k] int32, by falling probability
    weights: Tensor  # [T, top_k] fp32
    shared: Tensor  # [T] fp32: the shared expert's gate


@triton.jit
def _rows(tokens, H: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Rows [ROWS, 1] of this program, columns [1, PADDED], and which of them there are."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, PADDED)[None, :]
    return row, c, (row < tokens) & (c < H)


@triton.jit
def _store_normed(x, row, c, ok, scale_ptr, normed_ptr, ordered_ptr, H: tl.constexpr, EPS: tl.constexpr,
                  ORDERED: tl.constexpr):  # fmt: skip
    scale = tl.load(scale_ptr + c, mask=c < H, other=0.0)
    value = x * (1.0 / tl.sqrt(tl.sum(x * x, 1) / H + EPS))[:, None] * scale
    value = value.to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + row * H + c, value, mask=ok)
    if ORDERED:
        tl.store(ordered_ptr + row * H + operand_column(c), value, mask=ok)


@triton.jit(do_not_specialize=["tokens"])
def norm_kernel(
    ids_ptr, table_ptr, x_ptr, scale_ptr, normed_ptr, ordered_ptr, tokens, EMBED: tl.constexpr,
    ORDERED: tl.constexpr, H: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Program p: the norm of ROWS rows of the stream, which come from the embedding if EMBED."""
    row, c, ok = _rows(tokens, H, PADDED, ROWS)
    if EMBED:
        token = tl.load(ids_ptr + row, mask=row < tokens, other=0).to(tl.int64)
        x = tl.load(table_ptr + token * H + c, mask=ok, other=0.0)
        tl.store(x_ptr + row * H + c, x, mask=ok)
    else:
        x = tl.load(x_ptr + row * H + c, mask=ok, other=0.0)
    _store_normed(x.to(tl.float32), row, c, ok, scale_ptr, normed_ptr, ordered_ptr, H, EPS, ORDERED)


@triton.jit(do_not_specialize=["tokens"])
def combine_kernel(
    outputs_ptr, weights_ptr, gates_ptr, shared_ptr, x_ptr, scale_ptr, normed_ptr, tokens, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, H: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Program p: experts of ROWS rows by rank, the shared one, the stream; then the next norm."""
    row, c, ok = _rows(tokens, H, PADDED, ROWS)
    there = row < tokens
    total = tl.zeros((ROWS, PADDED), tl.float32)
    for rank in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + row * TOP_K + rank, mask=there, other=0.0)
        output = tl.load(outputs_ptr + (row * TOP_K + rank) * H + c, mask=ok, other=0.0).to(tl.float32)
        total = tl.fma(tl.broadcast_to(weight, (ROWS, PADDED)), output, total)
    if SHARED:
        weight = tl.load(gates_ptr + row, mask=there, other=0.0)
        output = tl.load(shared_ptr + row * H + c, mask=ok, other=0.0).to(tl.float32)
        total = tl.fma(tl.broadcast_to(weight, (ROWS, PADDED)), output, total)
    total += tl.load(x_ptr + row * H + c, mask=ok, other=0.0).to(tl.float32)
    rounded = total.to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + row * H + c, rounded, mask=ok)
    _store_normed(rounded.to(tl.float32), row, c, ok, scale_ptr, normed_ptr, normed_ptr, H, EPS, False)


@triton.jit(do_not_specialize=["tokens"])
def choose_kernel(
    logits_ptr, experts_ptr, weights_ptr, shared_ptr, total_ptr, tokens, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, RENORMALIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program p: the largest TOP_K of EXPERTS logits of ROWS rows, the lowest expert of equal ones, by softmax. Rows
    from the total on are not in use: they choose expert -1."""
    WIDTH: tl.constexpr = EXPERTS + 1 if SHARED else EXPERTS
    row, expert, ok = _rows(tokens, EXPERTS, PADDED, ROWS)
    there = row < tokens
    left = tl.load(logits_ptr + row * WIDTH + expert, mask=ok, other=float("-inf"))
    left = tl.where(there, left, 0.0)  # rows that are not there must not compute with infinities
    highest = tl.max(left, 1)[:, None]
    total = tl.zeros((ROWS, 1), tl.float32)
    if not RENORMALIZE:
        total = tl.sum(tl.exp(left - highest), 1)[:, None]
    found = ()
    for _ in tl.static_range(TOP_K):
        best = tl.max(left, 1)[:, None]
        index = tl.min(tl.where(left == best, expert, PADDED), 1)[:, None]
        index = tl.minimum(index, EXPERTS - 1)  # a row of NaN has no best; what follows must stay in bounds
        left = tl.where(expert == index, float("-inf"), left)
        likelihood = tl.exp(best - highest)
        if RENORMALIZE:
            total += likelihood
        found += (index, likelihood)
    used = row < tl.load(total_ptr)
    for rank in tl.static_range(TOP_K):
        tl.store(experts_ptr + row * TOP_K + rank, tl.where(used, found[2 * rank], -1), mask=there)
        tl.store(weights_ptr + row * TOP_K + rank, found[2 * rank + 1] / total, mask=there)
    if SHARED:
        gate = tl.load(logits_ptr + row * WIDTH + EXPERTS, mask=there, other=0.0)
        tl.store(shared_ptr + row, 1.0 / (1.0 + tl.exp(-gate)), mask=there)


def _shape(tokens: int, width: int) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and sizes of a kernel over rows."""
    shape = {"H": width, "PADDED": triton.next_power_of_2(width), "ROWS": ROWS, "num_warps": 4}
    return (triton.cdiv(tokens, ROWS),), {**shape, **FUSION}


def embed(ids: Tensor, table: Tensor, x: Tensor, scale: Tensor, normed: Tensor, eps: float) -> None:
    """Rows of `table` at ids [T] int32 into the stream x [T, H], and its norm."""
    tokens, hidden = x.shape
    check("ids", ids, (tokens,), torch.int32, x)
    check("table", table, (None, hidden), torch.bfloat16, x)
    _norm(ids, table, x, scale, normed, None, eps)


def norm(x: Tensor, scale: Tensor, normed: Tensor, eps: float, ordered: Tensor | None = None) -> None:
    """x [T, H] bf16 / rms * scale into `normed`, and into `ordered` in operand order."""
    _norm(None, None, x, scale, normed, ordered, eps)


def _norm(
    ids: Tensor | None, table: Tensor | None, x: Tensor, scale: Tensor, normed: Tensor, ordered: Tensor | None,
    eps: float,
) -> None:  # fmt: skip
    tokens, hidden = x.shape
    check("x", x, (tokens, hidden), torch.bfloat16, x)
    check("scale", scale, (hidden,), torch.float32, x)
    check("normed", normed, (tokens, hidden), torch.bfloat16, x)
    if ordered is not None:
        check("ordered", ordered, (tokens, hidden), torch.bfloat16, x)
    grid, shape = _shape(tokens, hidden)
    norm_kernel[grid](
        x if ids is None else ids, x if table is None else table, x, scale, normed,
        normed if ordered is None else ordered, tokens, EMBED=ids is not None, ORDERED=ordered is not None, EPS=eps,
        **shape,
    )  # fmt: skip


def combine(
    outputs: Tensor, choice: Choice, shared: Tensor | None, x: Tensor, scale: Tensor, normed: Tensor, eps: float
) -> None:
    """Adds outputs [T * top_k, H] and shared [T, H], bf16, weighted as chosen, to the stream x; then its norm."""
    tokens, hidden = x.shape
    top_k = choice.experts.shape[1]
    check("outputs", outputs, (tokens * top_k, hidden), torch.bfloat16, x)
    if shared is not None:
        check("shared", shared, (tokens, hidden), torch.bfloat16, x)
    check("normed", normed, (tokens, hidden), torch.bfloat16, x)
    grid, sizes = _shape(tokens, hidden)
    combine_kernel[grid](
        outputs, choice.weights, choice.shared, x if shared is None else shared, x, scale, normed, tokens,
        TOP_K=top_k, SHARED=shared is not None, EPS=eps, **sizes,
    )  # fmt: skip


def choose(logits: Tensor, choice: Choice, renormalize: bool, shared: bool, total: Tensor) -> None:
    """From fp32 router logits [T, E], with the shared expert's gate behind if `shared`. `total` [1] int32: rows in use;
    the others choose nothing."""
    tokens, width = logits.shape
    experts, top_k = width - int(shared), choice.experts.shape[1]
    check("logits", logits, (tokens, width), torch.float32, logits)
    check("choice.experts", choice.experts, (tokens, top_k), torch.int32, logits)
    check("total", total, (1,), torch.int32, logits)
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be 1 to {experts}, found {top_k}.")
    choose_kernel[(triton.cdiv(tokens, CHOSEN),)](
        logits, choice.experts, choice.weights, choice.shared, total, tokens, EXPERTS=experts,
        PADDED=triton.next_power_of_2(experts), TOP_K=top_k, SHARED=shared, RENORMALIZE=renormalize, ROWS=CHOSEN,
        num_warps=4, **FUSION,
    )  # fmt: skip
