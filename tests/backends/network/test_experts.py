"""Packed experts against their reference, and a row's bits against its neighbours."""

import pytest
import torch
from torch import Tensor

from stoker.backends.family import Family
from stoker.backends.network.experts import route, routed_experts
from stoker.backends.network.linear import Weight, as_tensor, linear
from stoker.backends.network.packing.pack import FEW_EXPERTS, pack_experts
from stoker.weights.formats.int4 import Int4
from tests.backends.network.test_operations import assert_rows_independent

HIDDEN, WIDTH = 128, 64


def expert_weights(count: int, int4: bool) -> tuple[Weight, Weight]:
    gate_up, down = torch.randn(count, 2 * WIDTH, HIDDEN) / 11, torch.randn(count, HIDDEN, WIDTH) / 8
    if int4:
        return Int4.quantize(gate_up, group=64), Int4.quantize(down, group=64)
    return gate_up.bfloat16(), down.bfloat16()


@pytest.mark.parametrize("count", [8, FEW_EXPERTS + 1])
@pytest.mark.parametrize("int4", [True, False])
def test_experts(count: int, int4: bool) -> None:
    gate_up, down = expert_weights(count, int4)
    packed = pack_experts(gate_up, down)
    assert packed.joined == (count <= FEW_EXPERTS)
    router = torch.randn(count, HIDDEN)

    def mixture(x: Tensor) -> tuple[Tensor, ...]:
        chosen, weights = route(linear(x.float(), router, Family.STEP), 3, True)
        return chosen, weights, packed(x, chosen, weights)

    x = torch.randn(128, HIDDEN).bfloat16()
    assert_rows_independent(mixture, x)
    chosen, weights, out = mixture(x)
    want = routed_experts(x.float(), chosen, weights, as_tensor(gate_up).float(), as_tensor(down).float(), Family.STEP)
    assert (out - want).norm() <= 0.01 * want.norm()
