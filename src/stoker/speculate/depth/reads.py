"""Bytes that steps and drafts read from memory, counted on the loaded weights: the controller's first guess at cost."""

from collections.abc import Iterator

from torch import nn

from stoker.backends.cpu.decoder import Decoder
from stoker.backends.cpu.experts import Experts
from stoker.backends.cpu.linear import Linear
from stoker.backends.cpu.ops.linear import Weight
from stoker.speculate.depth.cost import StepBytes
from stoker.weights.model_config import MoeConfig

PER_TOKEN = 0.003  # of the fixed bytes: activations, attention and arithmetic of one more token; soon measured


def _owned(module: nn.Module) -> Iterator[Weight]:
    """Weights that hang on this module itself. A projection's may be in a storage format, which is no parameter."""
    if isinstance(module, Linear):
        yield module.weight
    else:
        yield from (parameter for parameter in module._parameters.values() if parameter is not None)


def read_bytes(module: nn.Module, moe: MoeConfig | None, tokens: int = 0) -> tuple[int, int]:
    """Bytes that `tokens` tokens of different experts read of `module`, and those of one expert of every layer."""
    dense = expert = 0
    for part in module.modules():
        if isinstance(part, Experts):
            assert moe is not None
            expert += (part.gate_up_proj.nbytes + part.down_proj.nbytes) // moe.num_experts
        else:
            dense += sum(weight.nbytes for weight in _owned(part))
    return dense + (tokens * moe.top_k * expert if moe else 0), expert


def step_bytes(model: Decoder) -> StepBytes:
    """A verify step of the trunk: embedding rows are few, the MTP head is the drafter's."""
    moe = model.config.moe
    counted = [read_bytes(part, moe) for part in (model.layers, model.norm, model.lm_head)]
    fixed = sum(dense for dense, _ in counted)
    return StepBytes(
        fixed=fixed,
        expert=sum(expert for _, expert in counted),
        token=PER_TOKEN * fixed,
        experts=moe.num_experts if moe else 0,
        top_k=moe.top_k if moe else 0,
    )
