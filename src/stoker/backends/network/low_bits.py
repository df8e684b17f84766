"""Weights in fewer bits than they were stored with, for networks and heads that only guess."""

from typing import Literal

from torch import Tensor, nn

from stoker.backends.network.experts import Experts
from stoker.backends.network.linear import Linear, Weight
from stoker.backends.network.load import prepare
from stoker.errors import RequestError
from stoker.weights.formats.int4 import Int4
from stoker.weights.formats.int8 import Int8Row
from stoker.weights.formats.layout import INT4_GROUPS

Bits = Literal[4, 8]
SMALL = 64  # rows: gates and the like stay as they are, there is nothing to gain


def lower(weight: Tensor, bits: Bits) -> Weight:
    """[.., out, in] rounded to INT8 rows, or to INT4 in the largest groups that divide its inputs."""
    if bits == 8:
        return Int8Row.quantize(weight)
    inputs, outputs = weight.shape[-1], weight.shape[-2]
    group = next((size for size in sorted(INT4_GROUPS, reverse=True) if inputs % size == 0), None)
    if group is None or outputs % 8:
        raise RequestError(
            f"a drafting weight of {outputs} x {inputs} does not divide into INT4 groups of "
            f"{min(INT4_GROUPS)} inputs and words of 8 outputs; draft with int8 instead."
        )
    return Int4.quantize(weight, group=group)


def lower_all(module: nn.Module, bits: Bits) -> None:
    """Every plain projection and expert of a drafting network, in place. What is quantised already stays as it is."""
    for part in module.modules():
        if not isinstance(part, Linear | Experts):
            continue
        for name in ("weight",) if isinstance(part, Linear) else ("gate_up_proj", "down_proj"):
            weight = getattr(part, name)
            if isinstance(weight, Tensor) and weight.shape[-2] >= SMALL:
                delattr(part, name)
                setattr(part, name, lower(weight, bits))
    prepare(module)
