"""Routed INT4 experts of a step, packed for the kernels.

Routing, the shared expert and prefill are elsewhere.
"""

from torch import Tensor

from stoker.ops.dispatch import operation
from stoker.ops.experts import routed_experts
from stoker.ops.family import Family
from stoker.ops.int4_linear import PackedInt4


@operation
def int4_experts(x: Tensor, experts: Tensor, weights: Tensor, gate_up: PackedInt4, down: PackedInt4) -> Tensor:
    """Sum over a token's experts of weight * down(silu(gate x) * (up x)), fp32 [T, H], added in order of rank.

    x [T, H]; experts and weights [T, top_k]; gate_up [E, 2I, H] holds the gate rows first; down [E, H, I]. Only the
    activation between the two products is rounded, to the dtype of x.
    """
    return routed_experts.reference(x, experts, weights, gate_up, down, Family.STEP)
