"""Training against INT4: weights are rounded as they will be shipped, gradients pass straight through.

The rounding is Stoker's own (groups of consecutive inputs, the extreme on -8, scales of five significant bits so that
bf16 holds every weight exactly, no clip search); a test holds the two against each other.
"""

import torch
from torch import Tensor, nn

from stoker.weights.formats.int4 import five_bits
from training.config import quantised_format

SMALLEST = 2.0**-24  # smallest fp16 scale; a group of zeros has it


def round_int4(weight: Tensor, group: int) -> Tensor:
    """The values INT4 can hold that are nearest to `weight` [.., out, in], in fp32."""
    groups = weight.float().unflatten(-1, (-1, group))
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = five_bits(extreme / -8).half().float()
    scale = torch.where(scale == 0, torch.full_like(scale, SMALLEST).copysign(scale), scale)
    return ((groups / scale).round().clamp(-8, 7) * scale).flatten(-2)


def straight_through(weight: Tensor, group: int) -> Tensor:
    """round_int4 in the forward pass, the identity in the backward pass."""
    return weight + (round_int4(weight.detach(), group).to(weight.dtype) - weight.detach())


def int4_names(module: nn.Module, group: int, prefix: str = "") -> list[str]:
    """Parameters that are shipped in INT4."""
    return [
        name
        for name, parameter in module.named_parameters()
        if quantised_format(prefix + name, tuple(parameter.shape), group) == "int4"
    ]


def train_for_int4(module: nn.Module, group: int) -> None:
    """From now on the forward pass of `module` uses rounded weights wherever INT4 is shipped."""
    for name in int4_names(module, group):
        owner, _, attribute = name.rpartition(".")
        module.get_submodule(owner).int4_group[attribute] = group  # type: ignore[index, operator]


def snap(module: nn.Module, group: int) -> None:
    """Puts the weights themselves on the INT4 grid, for export."""
    with torch.no_grad():
        for name in int4_names(module, group):
            parameter = module.get_parameter(name)
            parameter.copy_(round_int4(parameter, group))
