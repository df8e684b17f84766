"""The routed INT4 experts against their reference, in Triton's interpreter."""

import re

import pytest
import torch
from torch import Tensor

from stoker.ops.int4_experts import int4_experts
from stoker.ops.int4_linear import PackedInt4, pack_int4

pytest.importorskip("triton")

EXPERTS, HIDDEN, INTER, TOP_K = 4, 256, 128, 2


def weight(*shape: int) -> PackedInt4:
    *lead, out, inputs = shape
    qweight = torch.randint(-(2**31), 2**31, (*lead, inputs // 8, out), dtype=torch.int64).int()
    return pack_int4(qweight, (torch.randn(*lead, inputs // 128, out) * 0.02).half())


def experts(hidden: int = HIDDEN, inter: int = INTER) -> tuple[PackedInt4, PackedInt4]:
    return weight(EXPERTS, 2 * inter, hidden), weight(EXPERTS, hidden, inter)


def inputs(tokens: int, hidden: int = HIDDEN) -> tuple[Tensor, Tensor, Tensor]:
    chosen = torch.rand(tokens, EXPERTS).topk(TOP_K).indices.int()
    return torch.randn(tokens, hidden).bfloat16(), chosen, torch.rand(tokens, TOP_K)


def test_reference_is_the_weighted_sum_of_the_experts_by_rank() -> None:
    gate_up, down = experts()
    x, chosen, weights = inputs(3)
    y = int4_experts(x, chosen, weights, gate_up, down)
    for token in range(3):
        total = torch.zeros(HIDDEN)
        for expert, weight_ in zip(chosen[token].tolist(), weights[token], strict=True):
            gate, up = (gate_up.dequantize()[expert] @ x[token].float()).chunk(2)
            hidden = (gate * torch.sigmoid(gate) * up).bfloat16().float()
            total += weight_ * (down.dequantize()[expert] @ hidden)
        torch.testing.assert_close(y[token], total, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_kernels_match_the_reference(interpreter, tokens: int) -> None:
    interpreter(check_parity, tokens, HIDDEN, INTER)


def test_kernels_match_the_reference_at_other_sizes(interpreter) -> None:
    interpreter(check_parity, 1, 384, 256)


def test_a_token_does_not_depend_on_its_company(interpreter) -> None:
    interpreter(check_rows)


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(2, 1, 1), (9, 8, 8), (16, 8, 256), (128, 8, 40)])
def test_tiles_hold_every_pair_once(interpreter, tokens: int, top_k: int, experts: int) -> None:
    interpreter(check_tiles, tokens, top_k, experts)


def test_kernels_name_what_is_wrong(interpreter) -> None:
    interpreter(check_messages)


def check_parity(tokens: int, hidden: int, inter: int) -> None:
    from stoker.ops.triton.int4_experts import int4_experts as kernels

    gate_up, down = experts(hidden, inter)
    x, chosen, weights = inputs(tokens, hidden)
    y = kernels(x, chosen, weights, gate_up, down)
    expected = int4_experts.reference(x, chosen, weights, gate_up, down)
    assert y.shape == (tokens, hidden)
    assert y.dtype == torch.float32
    # The interpreter rounds the activation towards zero, the reference to nearest: up to one bf16 step.
    assert float((y - expected).norm() / expected.norm()) < 2.0**-7


def check_rows() -> None:
    from stoker.ops.triton.int4_experts import int4_experts as kernels

    gate_up, down = experts()
    x, chosen, weights = inputs(20)  # 10 pairs an expert: two tiles each
    y = kernels(x, chosen, weights, gate_up, down)
    for tokens in (1, 9):
        assert torch.equal(kernels(x[:tokens], chosen[:tokens], weights[:tokens], gate_up, down), y[:tokens]), tokens
    order = torch.randperm(20)
    assert torch.equal(kernels(x[order], chosen[order], weights[order], gate_up, down), y[order])
    alone = kernels(x[13:14], chosen[13:14], weights[13:14], gate_up, down)
    assert torch.equal(alone[0], y[13])


def check_tiles(tokens: int, top_k: int, experts: int) -> None:
    from stoker.ops.triton.int4_experts import expert_tiles

    chosen = torch.rand(tokens, experts).topk(top_k).indices.int()
    tile_expert, tile_pairs = expert_tiles(chosen)
    flat = chosen.flatten().tolist()
    held = []
    for expert, pairs in zip(tile_expert.tolist(), tile_pairs.tolist(), strict=True):
        pairs = [pair for pair in pairs if pair >= 0]
        assert (expert < 0) == (not pairs)
        assert all(flat[pair] == expert for pair in pairs)
        held += pairs
    assert sorted(held) == list(range(tokens * top_k))
    # No more tiles than eight pairs each need: every expert is read once per eight pairs.
    needed = sum(-(-flat.count(expert) // 8) for expert in set(flat))
    assert int((tile_expert >= 0).sum()) == needed


def check_messages() -> None:
    from stoker.ops.triton.int4_experts import int4_experts as kernels

    gate_up, down = experts()
    x, chosen, weights = inputs(4)
    wrong = [
        ((x, chosen.long(), weights, gate_up, down), "experts must be torch.int32, found torch.int64."),
        ((x, chosen, weights.half(), gate_up, down), "weights must be torch.float32, found torch.float16."),
        (
            (x, chosen[:3], weights, gate_up, down),
            "experts and weights must both be [4, top_k], found [3, 2] and [4, 2].",
        ),
        ((x, chosen, weights, gate_up[0], down), "gate_up.packed must have 5 dimensions, found [16, 2, 16, 32]."),
        (
            (x, chosen, weights, down, down),
            "x must be [tokens, 128], found [4, 256].",
        ),
        (
            (x, chosen, weights, weight(EXPERTS, 128, HIDDEN), down),
            "gate_up must be [4, 256, hidden] for a down of [4, 256, 128], found [4, 128, 256].",
        ),
    ]
    for args, message in wrong:
        with pytest.raises(ValueError, match=re.escape(message)):
            kernels(*args)
