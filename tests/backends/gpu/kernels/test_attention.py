"""Attention of a step in Triton's interpreter: against fp64, and the same bits in any block and any sharing out."""

import copy
import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from stoker.backends.network.attention import write_pages

pytest.importorskip("triton")

HEADS, KV_HEADS, D, HALF, EPS, CACHED = 4, 2, 16, 2, 1e-6, 253
LONG = 380  # two leaves and more of a second split
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(("stored", "limit"), [(torch.float32, 2.0**-7), (torch.bfloat16, 2.0**-5), (FP8, 0.1)])
def test_a_block_matches_fp64(interpreter, stored: torch.dtype, limit: float) -> None:
    interpreter(check_values, stored, limit)


@pytest.mark.parametrize("stored", [torch.bfloat16, FP8])
def test_a_token_has_the_same_bits_alone_and_in_a_block(interpreter, stored: torch.dtype) -> None:
    interpreter(check_blocks, stored)


@pytest.mark.parametrize("stored", [torch.float32, FP8])
def test_a_token_has_the_same_bits_however_its_keys_are_shared_out(interpreter, stored: torch.dtype) -> None:
    interpreter(check_shares, stored)


@pytest.mark.parametrize("sight", [{"whole_block": True}, {"window": 200}])
def test_sight_is_the_same_however_keys_are_shared_out(interpreter, sight: dict[str, Any]) -> None:
    interpreter(check_sight, sight)


def test_fp8_pages_hold_what_the_reference_writes(interpreter) -> None:
    interpreter(check_fp8)


def test_kernel_names_what_is_wrong(interpreter) -> None:
    interpreter(check_messages)


class Case:
    """Two sequences with all but a few of their keys in pages."""

    def __init__(self, stored: torch.dtype, cached: int = CACHED) -> None:
        from stoker.backends.gpu.kernels.attention import AttentionWeights, Heads, Pages

        self.heads = Heads(HEADS, KV_HEADS, D, gated=True)
        angles = torch.arange(400)[:, None] * torch.tensor([1.0, 0.01])
        self.weights = AttentionWeights(torch.rand(D) + 0.5, torch.rand(D) + 0.5, angles.cos(), angles.sin(), EPS)
        self.y = torch.randn(2, cached + 8, self.heads.width)

        def zeros(*shape: int, dtype: torch.dtype = stored) -> Tensor:
            return torch.zeros(16, 64, KV_HEADS, *shape, dtype=dtype)

        scales = [zeros(dtype=torch.bfloat16) for _ in range(2)] if stored is FP8 else []
        self.pages = Pages(zeros(D), zeros(D), torch.randperm(16).int().view(2, 8), *scales)
        for b in range(2):
            _, k, v, _ = self.parts(b, cached)
            position = torch.arange(cached)
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

    def expected(self, b: int, count: int, whole_from: int = 0, window: int = 0) -> Tensor:
        """Of a causal sequence; tokens from `whole_from` on, if there is one, see each other."""
        q, k, v, gate = self.parts(b, count)
        k, v = k.repeat_interleave(HEADS // KV_HEADS, 1), v.repeat_interleave(HEADS // KV_HEADS, 1)
        hidden = torch.full((count, count), -torch.inf).triu(1)
        if whole_from:
            hidden[whole_from:, whole_from:] = 0
        if window:
            hidden += torch.full((count, count), -torch.inf).tril(-window)
        weights = (torch.einsum("qhd,khd->hqk", q, k) * D**-0.5 + hidden).softmax(-1)
        return (torch.einsum("hqk,khd->qhd", weights, v) * torch.sigmoid(gate)).flatten(1)

    def run(
        self,
        pages: Any,
        at: tuple[int, int],
        lengths: tuple[int, int],
        rows: int,
        splits: int = 2,
        sight: Any = None,
    ) -> Tensor:
        """[2, rows, H * D] of tokens at .. at + length - 1 of each sequence; rows past that are noise."""
        from stoker.backends.gpu.kernels.attention import CAUSAL, Partials, attention
        from stoker.backends.gpu.kernels.deltanet import Sequences
        from stoker.backends.gpu.kernels.launch import Workspace

        y = torch.randn(2, rows, self.heads.width)  # rows without a token have other numbers each time
        for b in range(2):
            y[b, : lengths[b]] = self.y[b, at[b] : at[b] + lengths[b]]
        out = torch.zeros(2 * rows, HEADS * D)
        if pages.keys.dtype is not torch.float32:  # else the interpreter shows results as they were before rounding
            out = out.bfloat16()
        zero = torch.zeros(2, dtype=torch.int32)
        sequences = Sequences(rows, zero, torch.tensor(at).int(), torch.tensor(lengths).int(), zero)
        space = Workspace.allocate(1, 2 * KV_HEADS * rows * 4, "cpu")
        partials = Partials.allocate(2 * rows, self.heads, splits, "cpu")
        attention(
            y.flatten(0, 1), out, pages, self.weights, self.heads, sequences, partials, space, sight=sight or CAUSAL
        )
        assert not space.counters.any()
        kept = (torch.arange(rows) < torch.tensor(lengths)[:, None])[..., None]
        return out.view(2, rows, -1) * kept


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


# settings that may change no bit: leaves or whole splits to a program, who joins them, columns of a program
SHARES: list[dict[str, Any]] = [
    {"LEAF_CELLS": 0},
    {"JOINED_AT_ONCE": 0},
    {"LEAF_CELLS": 0, "JOINED_AT_ONCE": 0},
    {"FEW_PROGRAMS": 1},
    {"FEW_PROGRAMS": 64, "PART_COLUMNS": 8},
    {"FEW_PROGRAMS": 64, "PART_COLUMNS": 4, "JOINED_AT_ONCE": 0},
]


def check_shares(stored: torch.dtype) -> None:
    case = Case(stored, LONG)
    for at, lengths in (((LONG, CACHED), (3, 2)), ((LONG - 1, 3), (1, 1))):
        expected = case.run(copy.deepcopy(case.pages), at, lengths, max(lengths))
        for settings in SHARES if stored is torch.float32 and max(lengths) > 1 else SHARES[2:5:2]:
            found = shared_out(settings, case, at, lengths)
            assert torch.equal(found, expected), settings
    # a longer bucket, in which the slots behind the context have nothing to do
    pages = copy.deepcopy(case.pages)
    assert torch.equal(case.run(pages, (100, 40), (2, 1), 2, splits=1), case.run(pages, (100, 40), (2, 1), 2))


def check_sight(options: dict[str, Any]) -> None:
    from stoker.backends.gpu.kernels.attention import Sight

    case, sight = Case(torch.float32, LONG), Sight(**options)
    at, lengths = (LONG, 60), (5, 3)
    expected = case.run(copy.deepcopy(case.pages), at, lengths, 5, sight=sight)
    for settings in SHARES[2:5:2]:
        assert torch.equal(shared_out(settings, case, at, lengths, sight), expected), settings
    for b, (cached, count) in enumerate(zip(at, lengths, strict=True)):
        reference = case.expected(b, cached + count, sight.whole_block and cached, sight.window)[cached:]
        assert float((expected[b, :count].double() - reference).norm() / reference.norm()) < 2.0**-7


def shared_out(
    settings: dict[str, Any], case: Case, at: tuple[int, int], lengths: tuple[int, int], sight: Any = None
) -> Tensor:
    from stoker.backends.gpu.kernels import attention

    with patch.multiple(attention, **settings):
        return case.run(copy.deepcopy(case.pages), at, lengths, max(lengths), sight=sight)


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
