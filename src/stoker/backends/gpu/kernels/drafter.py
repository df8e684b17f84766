# Triton types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What a DFlash drafter needs beside the step's kernels: its context's keys and values, and a dense layer's SiLU."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.backends.gpu.kernels.deltanet import Sequences, check_sequences
from stoker.backends.gpu.kernels.keys import rotated
from stoker.backends.gpu.kernels.launch import check, dependent
from stoker.backends.gpu.kernels.products import wait_for_inputs
from stoker.backends.gpu.kernels.rows import FUSION

COLUMNS = 1024  # of a SwiGLU program


@dataclass(frozen=True)
class ContextPages:
    """Keys and values of all L layers of a drafter, [L, pages, page_size, kv_heads, D] bf16 each."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class ContextWeights:
    k_norms: Tensor  # [L, D] fp32
    cos: Tensor  # [positions, D / 2] fp32
    sin: Tensor
    eps: float


@triton.jit(do_not_specialize=["block_rows", "table", "pages"])
def remember_kernel(
    y_ptr, keys_ptr, values_ptr, tables_ptr, norms_ptr, cos_ptr, sin_ptr, cached_ptr, lengths_ptr, block_rows, table,
    pages, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (g, b, t): kv head g % KV_HEADS of layer g // KV_HEADS, for the t-th eight tokens of sequence b."""
    WIDTH: tl.constexpr = 2 * LAYERS * KV_HEADS * D
    wait_for_inputs(PDL)
    layer = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    sequence = tl.program_id(1)
    token = (tl.program_id(2) * 8 + tl.arange(0, 8))[:, None]
    ok = token < tl.load(lengths_ptr + sequence)
    d = tl.arange(0, D)[None, :]
    kind = keys_ptr.dtype.element_ty
    position = tl.load(cached_ptr + sequence) + token
    at = (sequence * block_rows + token) * WIDTH + (2 * layer * KV_HEADS + head) * D
    k = rotated(y_ptr, at, ok, d, norms_ptr + layer * D, cos_ptr, sin_ptr, position, HALF, D, EPS, kind)
    v = tl.load(y_ptr + at + KV_HEADS * D + d, mask=ok, other=0.0).to(kind)
    page = tl.load(tables_ptr + sequence * table + position // PAGE, mask=ok, other=0)
    place = ((layer * pages + page).to(tl.int64) * PAGE + position % PAGE) * KV_HEADS + head
    tl.store(keys_ptr + place * D + d, k, mask=ok)
    tl.store(values_ptr + place * D + d, v, mask=ok)


@triton.jit
def swiglu_kernel(y_ptr, out_ptr, INTER: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    """Program (t, c): the c-th COLUMNS columns of silu(gate) * up of row t; y has gate and up side by side."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ok = c < INTER
    gate = tl.load(y_ptr + row * (2 * INTER) + c, mask=ok, other=0.0)
    up = tl.load(y_ptr + row * (2 * INTER) + INTER + c, mask=ok, other=0.0)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * INTER + c, y.to(out_ptr.dtype.element_ty), mask=ok)


def remember(
    y: Tensor, pages: ContextPages, tables: Tensor, weights: ContextWeights, sequences: Sequences, pdl: bool = False
) -> None:
    """y [T, L * 2 * kv_heads * D] fp32, keys then values layer by layer: keys are normed and turned, both are stored.

    `tables` int32 [B, P] are the pages of each sequence. Rows past a sequence's length store nothing.
    """
    layers, count, page, heads, dim = pages.keys.shape
    tokens = sequences.count * sequences.rows
    if dim & dim - 1:
        raise ValueError(f"the head dimension must be a power of two, found {dim}.")
    check("y", y, (tokens, 2 * layers * heads * dim), torch.float32, y)
    for name in ("keys", "values"):
        check(name, getattr(pages, name), (layers, count, page, heads, dim), torch.bfloat16, y)
    check("tables", tables, (sequences.count, None), torch.int32, y)
    check("k_norms", weights.k_norms, (layers, dim), torch.float32, y)
    check("cos", weights.cos, (None, None), torch.float32, y)
    check("sin", weights.sin, tuple(weights.cos.shape), torch.float32, y)
    check_sequences(sequences, y)
    remember_kernel[(layers * heads, sequences.count, triton.cdiv(sequences.rows, 8))](
        y, pages.keys, pages.values, tables, weights.k_norms, weights.cos, weights.sin, sequences.cached,
        sequences.lengths, sequences.rows, tables.shape[1], count, LAYERS=layers, KV_HEADS=heads, D=dim,
        HALF=weights.cos.shape[1], PAGE=page, EPS=weights.eps, num_warps=4, **FUSION, **dependent(y.device, pdl),
    )  # fmt: skip


def swiglu(y: Tensor, out: Tensor, pdl: bool = False) -> None:
    """out [T, I] bf16 = silu(gate) * up of y [T, 2 I] fp32, the gate first."""
    tokens, inter = out.shape
    check("y", y, (tokens, 2 * inter), torch.float32, y)
    check("out", out, (tokens, inter), torch.bfloat16, y)
    swiglu_kernel[(tokens, triton.cdiv(inter, COLUMNS))](
        y, out, INTER=inter, COLUMNS=COLUMNS, num_warps=4, **FUSION, **dependent(y.device, pdl)
    )
