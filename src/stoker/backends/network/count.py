"""Bytes of loaded weights by group: `sizes` adds them up by the names they have in a checkpoint."""

from collections.abc import Iterator

from torch import nn

from stoker.backends.network.decoder import Decoder
from stoker.backends.network.experts import Experts
from stoker.backends.network.linear import Linear
from stoker.sizes.weights import WeightBytes
from stoker.speculate.depth.cost import StepBytes


def loaded_bytes(module: nn.Module, prefix: str = "") -> WeightBytes:
    """`prefix` is what the module's names begin with in a checkpoint."""
    return WeightBytes.stored((f"{prefix}{name}", "", size) for name, size in _weights(module))


def step_bytes(model: Decoder) -> StepBytes:
    """What a verify step reads: the depth controller's first guess at its cost."""
    return StepBytes.of(loaded_bytes(model), model.config.moe)


def _weights(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Name and bytes. A projection's or an expert's weight may be in a storage format, which is no parameter."""
    for name, part in module.named_modules():
        own = {"weight": part.weight} if isinstance(part, Linear) else dict(part._parameters)
        if isinstance(part, Experts):
            own = {"gate_up_proj": part.gate_up_proj, "down_proj": part.down_proj}
        for key, weight in own.items():
            if weight is not None:
                yield f"{name}.{key}", weight.nbytes
