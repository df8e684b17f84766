"""Products of a prompt in Triton's interpreter: against fp64, and the same bits in any company."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

pytest.importorskip("triton")

KINDS = ["INT4", "BF16", "FP8", "INT8", "NVFP4"]
# The interpreter rounds to bf16 towards zero, by up to 2^-7 and 2^-8 on average of the square. INT4 and FP8 weights
# are rounded once when they are unpacked, INT8 and NVFP4 are exact; a wrong scale or a wrong quarter is off by 1.
ROUNDED_WEIGHTS = 2.0**-7


@pytest.mark.parametrize("kind", KINDS)
def test_a_projection_matches_fp64(interpreter, kind: str) -> None:
    interpreter(check_linear, kind)


def test_a_row_has_the_same_bits_in_any_number_of_rows(interpreter) -> None:
    interpreter(check_rows)


def test_a_projection_is_added_to_the_stream(interpreter) -> None:
    interpreter(check_add)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_match_fp64(interpreter, kind: str) -> None:
    interpreter(check_experts, kind)


def test_a_pair_has_the_same_bits_in_any_company(interpreter) -> None:
    interpreter(check_company)


def test_pairs_are_grouped_by_expert_in_order(interpreter) -> None:
    interpreter(check_groups)


def test_kernels_name_what_is_wrong(interpreter) -> None:
    interpreter(check_messages)


def weight(kind: str, *shape: int) -> Any:
    from benchmarks.gpu.weights import random_weight

    from stoker.backends.gpu.packed import Kind

    found = random_weight(Kind[kind], shape, "cpu")
    if kind == "NVFP4":  # scales that differ: 2^-1 .. 2^1, with all mantissas
        found.scales.copy_(
            torch.randint(0x30, 0x40, (*found.scales.shape, 4), dtype=torch.uint8).view(torch.int32)[..., 0]
        )
    return found


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def linear(x: Tensor, packed: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    from stoker.backends.gpu.kernels.prefill_linear import prefill_linear, unpacked
    from stoker.backends.gpu.packed import Kind

    y = torch.full((x.shape[0], packed.out_features), torch.nan, dtype=dtype)
    dense = unpacked(packed, torch.empty(packed.rows * packed.in_features, dtype=torch.bfloat16))
    prefill_linear(x, dense, y, row_scales=packed.kind in (Kind.INT8, Kind.NVFP4))
    return y


def check_linear(kind: str) -> None:
    packed, x = weight(kind, 163, 256), torch.randn(70, 256).bfloat16()  # odd sizes, more than a tile of each
    expected = x.double() @ packed.dequantize().double().t()
    assert error(linear(x, packed), expected) < (ROUNDED_WEIGHTS if kind in ("INT4", "FP8") else 1e-6)


def check_rows() -> None:
    packed, x = weight("INT4", 160, 256), torch.randn(200, 256).bfloat16()
    whole = linear(x, packed)
    for first, count in ((0, 64), (64, 136), (100, 1), (199, 1)):
        assert torch.equal(linear(x[first : first + count].contiguous(), packed), whole[first : first + count])


def check_add() -> None:
    from stoker.backends.gpu.kernels.prefill_linear import prefill_linear, unpacked

    packed, x, y = weight("INT8", 64, 128), torch.randn(3, 128).bfloat16(), torch.randn(3, 64).bfloat16()
    expected = y.double() + x.double() @ packed.dequantize().double().t()
    dense = unpacked(packed, torch.empty(64 * 128, dtype=torch.bfloat16))
    prefill_linear(x, dense, y, add=True, row_scales=True)
    assert error(y, expected) < 2.0**-7


def in_operand_order(x: Tensor) -> Tensor:
    """Inputs counted (c, step, low) in each 32 lie as (step, c, low)."""
    return x.unflatten(-1, (-1, 4, 4, 2)).transpose(-3, -2).flatten(-4).contiguous()


def experts(x: Tensor, chosen: Tensor, gate_up: Any, down: Any) -> Tensor:
    """[T, top_k, H]"""
    from stoker.backends.gpu.kernels.prefill_experts import PairTiles, group_pairs, prefill_experts

    tokens, top_k = chosen.shape
    tiles = PairTiles.allocate(tokens * top_k, gate_up.packed.shape[0], "cpu")
    group_pairs(chosen, tiles)
    hidden = torch.full((tokens * top_k, down.in_features), torch.nan).bfloat16()
    out = torch.full((tokens * top_k, x.shape[1]), torch.nan).bfloat16()
    prefill_experts(in_operand_order(x), top_k, tiles, gate_up, down, hidden, out)
    return out.view(tokens, top_k, -1)


def check_experts(kind: str) -> None:
    gate_up, down = weight(kind, 3, 256, 128), weight(kind, 3, 128, 128)
    x, chosen = torch.randn(40, 128).bfloat16(), torch.tensor([[2, 0]] * 40, dtype=torch.int32)
    chosen[:30, 1] = 2  # 70 pairs of the last expert, more than a tile; 10 of the first, none of the other
    first, second = (packed.dequantize().double() for packed in (gate_up, down))
    for rank in range(2):
        mine = chosen[:, rank].long()
        gate, up = torch.einsum("toi,ti->to", first[mine], x.double()).chunk(2, dim=1)
        expected = torch.einsum("toi,ti->to", second[mine], silu(gate) * up)
        # what lies between, and the result, are rounded to bf16
        assert error(experts(x, chosen, gate_up, down)[:, rank], expected) < 2.0**-6


def check_company() -> None:
    gate_up, down = weight("INT4", 3, 256, 128), weight("INT4", 3, 128, 128)
    x, chosen = torch.randn(80, 128).bfloat16(), torch.randint(0, 3, (80, 2), dtype=torch.int32)
    whole = experts(x, chosen, gate_up, down)
    for first, count in ((64, 16), (79, 1)):
        part = slice(first, first + count)
        assert torch.equal(experts(x[part], chosen[part].contiguous(), gate_up, down), whole[part])


def check_groups() -> None:
    """In tiles of 64, and, where an expert has few, of 32 or 16."""
    from stoker.backends.gpu.kernels.prefill_experts import PairTiles, group_pairs, tile_size

    tiles = PairTiles.allocate(600, 5, "cpu")
    for tokens, size in ((300, 64), (70, 32), (40, 16)):
        chosen = torch.randint(0, 5, (tokens, 2), dtype=torch.int32)
        chosen[chosen == 3] = 1
        group_pairs(chosen, tiles)
        count = int(tiles.tile_count)
        assert tile_size(2 * tokens, 5) == size
        pairs, owner = tiles.tile_pairs[: count * size].view(count, size), tiles.tile_expert[:count]
        for expert in range(5):
            own = (chosen.flatten() == expert).nonzero()[:, 0]
            found = pairs[owner == expert].flatten()
            assert found.shape[0] == -(-len(own) // size) * size
            assert torch.equal(found[: len(own)], own.int())
            assert bool((found[len(own) :] == -1).all())


def check_messages() -> None:
    from stoker.backends.gpu.kernels.prefill_experts import PairTiles, group_pairs, prefill_experts
    from stoker.backends.gpu.kernels.prefill_linear import prefill_linear, unpacked

    packed, x = weight("INT4", 64, 128), torch.randn(3, 128).bfloat16()
    y, scratch = torch.empty(3, 64), torch.empty(64 * 128, dtype=torch.bfloat16)
    dense = unpacked(packed, scratch)
    chosen = torch.zeros(200, 1, dtype=torch.int32)
    narrow = weight("INT4", 2, 64, 128), weight("INT4", 2, 128, 128)
    pairs = torch.empty(3, 128).bfloat16()
    wrong: list[tuple[Any, tuple[Any, ...], str]] = [
        (prefill_linear, (x.float(), dense, y), "x must be torch.bfloat16, found torch.float32."),
        (prefill_linear, (x, dense, y[:2]), "y must be [3, 64], found [2, 64]."),
        (prefill_linear, (x, packed, y), "the weight must be unpacked to BF16, found INT4."),
        (unpacked, (packed, scratch[:9]), "scratch must hold 8192 bf16, found 9 of torch.bfloat16."),
        (group_pairs, (chosen, PairTiles.allocate(64, 4, "cpu")), "200 pairs are to be grouped, room is for 64."),
        (
            prefill_experts,
            (x, 1, PairTiles.allocate(3, 2, "cpu"), *narrow, pairs, pairs),
            "gate_up must be [experts, 256, 128] for a down of [experts, 128, 128], found [64, 128] and [128, 128].",
        ),
    ]
    for call, arguments, message in wrong:
        with pytest.raises(ValueError, match=re.escape(message)):
            call(*arguments)
