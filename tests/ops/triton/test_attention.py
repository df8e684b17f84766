"""Attention of a step in Triton's interpreter: against fp64, and the same bits in any block and with any join."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.ops.attention import write_pages

pytest.importorskip("triton")

HEADS, KV_HEADS, D, HALF, EPS, CACHED = 4, 2, 16, 2, 1e-6, 253
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(("stored", "limit"), [(torch.float32, 2.0**-7), (torch.bfloat16, 2.0**-5), (FP8, 0.1)])
def test_a_block_matches_fp64(interpreter, stored: torch.dtype, limit: float) -> None:
    interpreter(check_values, stored, limit)


@pytest.mark.parametrize("stored", [torch.bfloat16, FP8])
def test_a_token_has_the_same_bits_alone_and_in_a_block(interpreter, stored: torch.dtype) -> None:
    interpreter(check_blocks, stored)


def test_splits_are_joined_alike_in_both_ways(interpreter) -> None:
    interpreter(check_joins)


def test_fp8_pages_hold_what_the_reference_writes(interpreter) -> None:
    interpreter(check_fp8)


def test_kernel_names_what_is_wrong(interpreter) -> None:
    interpreter(check_messages)


class Case:
    """Two sequences with all but a few of their keys in pages."""

    def __init__(self, stored: torch.dtype) -> None:
        from stoker.ops.triton.attention import AttentionWeights, Heads, Pages

        self.heads = Heads(HEADS, KV_HEADS, D, gated=True)
        angles = torch.arange(300)[:, None] * torch.tensor([1.0, 0.01])
        self.weights = AttentionWeights(torch.rand(D) + 0.5, torch.rand(D) + 0.5, angles.cos(), angles.sin(), EPS)
        self.y = torch.randn(2, CACHED + 8, self.heads.width)

        def zeros(*shape: int, dtype: torch.dtype = stored) -> Tensor:
            return torch.zeros(16, 64, KV_HEADS, *shape, dtype=dtype)

        scales = [zeros(dtype=torch.bfloat16) for _ in range(2)] if stored is FP8 else []
        self.pages = Pages(zeros(D), zeros(D), torch.randperm(16).int().view(2, 8), *scales)
        for b in range(2):
            _, k, v, _ = self.parts(b, CACHED)
            position = torch.arange(CACHED)
            where = self.pages.tables[b, position // 64].long() * 64 + position % 64
            write_pages(self.pages.keys, k.float(), where, self.pages.key_scales)
            write_pages(self.pages.values, v.float(), where, self.pages.value_scales)

    def parts(self, b: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """fp64 queries, keys, values and gates of the first tokens."""
        y = self.y[b, :count].double()
        q, k, v = y.split([2 * HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=1)
        q, gate = q.view(count, HEADS, 2 * D).chunk(2, dim=-1)
        return (
            self._turned(q, self.weights.q_norm),
            self._turned(k.view(count, KV_HEADS, D), self.weights.k_norm),
            (v.view(count, KV_HEADS, D)),
            gate,
        )

    def _turned(self, x: Tensor, scale: Tensor) -> Tensor:
        x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * scale
        first, second, rest = x.split([HALF, HALF, D - 2 * HALF], dim=-1)
        cos, sin = (table[: x.shape[0], None].double() for table in (self.weights.cos, self.weights.sin))
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def expected(self, b: int, count: int) -> Tensor:
        q, k, v, gate = self.parts(b, count)
        k, v = k.repeat_interleave(HEADS // KV_HEADS, 1), v.repeat_interleave(HEADS // KV_HEADS, 1)
        hidden = torch.full((count, count), -torch.inf).triu(1)
        weights = (torch.einsum("qhd,khd->hqk", q, k) * D**-0.5 + hidden).softmax(-1)
        return (torch.einsum("hqk,khd->qhd", weights, v) * torch.sigmoid(gate)).flatten(1)

    def run(self, pages: Any, at: tuple[int, int], lengths: tuple[int, int], rows: int, splits: int = 2) -> Tensor:
        """[2, rows, H * D] of tokens at .. at + length - 1 of each sequence; rows past that are noise."""
        from stoker.ops.triton.attention import Partials, attention
        from stoker.ops.triton.deltanet import Sequences
        from stoker.ops.triton.launch import Workspace

        y = torch.randn(2, rows, self.heads.width)
        for b in range(2):
            y[b, : lengths[b]] = self.y[b, at[b] : at[b] + lengths[b]]
        out = torch.zeros(2 * rows, HEADS * D).bfloat16()
        zero = torch.zeros(2, dtype=torch.int32)
        sequences = Sequences(rows, zero, torch.tensor(at).int(), torch.tensor(lengths).int(), zero)
        space = Workspace.allocate(1, 2 * KV_HEADS * rows, "cpu")
        partials = Partials.allocate(2 * rows, self.heads, splits, "cpu")
        attention(y.flatten(0, 1), out, pages, self.weights, self.heads, sequences, partials, space)
        assert not space.counters.any()
        return out.view(2, rows, -1)


def check_values(stored: torch.dtype, limit: float) -> None:
    case = Case(stored)
    out = case.run(case.pages, (CACHED, CACHED - 2), (5, 3), 5)  # over the border of two splits
    for b, first, count in ((0, CACHED, 5), (1, CACHED - 2, 3)):
        expected = case.expected(b, CACHED + 5)[first : first + count]
        assert float((out[b, :count].double() - expected).norm() / expected.norm()) < limit


def check_blocks(stored: torch.dtype) -> None:
    case = Case(stored)
    pages = copy.deepcopy(case.pages)
    block = case.run(case.pages, (CACHED, CACHED), (5, 4), 5)
    for token in range(4):
        alone = case.run(pages, (CACHED + token, CACHED + token), (1, 1), 1)
        assert torch.equal(alone[:, 0], block[:, token]), token


def check_joins() -> None:
    from stoker.ops.triton import attention

    case = Case(torch.bfloat16)
    at_once = case.run(copy.deepcopy(case.pages), (CACHED, CACHED), (5, 2), 5)
    attention.JOINED_AT_ONCE, before = 0, attention.JOINED_AT_ONCE
    try:
        apart = case.run(case.pages, (CACHED, CACHED), (5, 2), 5)
    finally:
        attention.JOINED_AT_ONCE = before
    assert torch.equal(apart, at_once)


def check_fp8() -> None:
    case = Case(FP8)
    expected = copy.deepcopy(case.pages)
    case.run(case.pages, (CACHED, CACHED), (3, 3), 3)
    for b in range(2):
        v = case.y[b, CACHED : CACHED + 3, -KV_HEADS * D :].view(3, KV_HEADS, D)
        v = (v.contiguous().view(torch.int32) & -65536).view(torch.float32)  # the interpreter rounds towards zero
        position = torch.arange(CACHED, CACHED + 3)
        where = expected.tables[b, position // 64].long() * 64 + position % 64
        write_pages(expected.values, v, where, expected.value_scales)
        assert case.pages.value_scales is not None
        scales = case.pages.value_scales.flatten(0, 1)[where].float()
        # the scale itself may be rounded the other way; what is stored must be the nearest code for that scale
        values = case.pages.values.flatten(0, 1)[where].float() * scales[..., None]
        assert float((values - v).abs().max() / v.abs().max()) < 2.0**-4
        codes = (v / scales[..., None]).clamp(-448, 448).to(FP8)
        assert torch.equal(case.pages.values.flatten(0, 1)[where].view(torch.uint8), codes.view(torch.uint8))


def check_messages() -> None:
    case = Case(torch.bfloat16)
    wrong = [
        (lambda: case.run(case.pages, (0, 0), (1, 1), 1, splits=3), "3 splits of 256 keys need a table of 12 pages"),
        (
            lambda: case.run(_replaced(case.pages, "keys", case.pages.keys.half()), (0, 0), (1, 1), 1),
            "keys must be torch.bfloat16, found torch.float16.",
        ),
        (
            lambda: case.run(_replaced(case.pages, "tables", case.pages.tables.long()), (0, 0), (1, 1), 1),
            "tables must be torch.int32, found torch.int64.",
        ),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def _replaced(pages: Any, field: str, value: Tensor) -> Any:
    from dataclasses import replace

    return replace(pages, **{field: value})
