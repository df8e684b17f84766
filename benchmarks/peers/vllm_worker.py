"""What `vllm.py` has run inside vLLM's worker: weights whose routing is spread, and a count of the experts chosen.

vLLM imports this file by name (`worker_extension_cls`) before it builds the model; that registers the loader.
"""

import statistics
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.weights import CODE_RMS, SHIFT
from stoker.backends.gpu.packed import Kind

LOAD_FORMAT = "stoker-spread"
GROUP = 128  # inputs that share a scale
ZERO_POINTS = 0x77777777  # eight nibbles of 7: GPTQ stores the zero point 8 less one
TO_STREAM = ("o_proj", "out_proj", "down_proj", "w2_")  # their outputs are added to the stream


class ExpertCount:
    """Methods that vLLM's worker gains; they are called by name from the benchmark, on an engine without graphs."""

    get_model: Any  # the worker's own

    def watch_experts(self, top_k: int) -> int:
        """Looks at every router's logits from now on; gives the number of routers."""
        self.distinct_by_tokens: dict[int, list[int]] = {}
        gates = [module for name, module in self.get_model().named_modules() if name.endswith(".mlp.gate")]
        for gate in gates:
            gate.register_forward_hook(partial(self._count, top_k))
        return len(gates)

    def distinct_experts(self) -> list[list[float]]:
        """[[tokens of a step, mean distinct experts of a layer]] since the last call."""
        found = [[tokens, statistics.mean(counts)] for tokens, counts in self.distinct_by_tokens.items()]
        self.distinct_by_tokens.clear()
        return found

    def _count(self, top_k: int, gate: nn.Module, inputs: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output  # [T, E]
        chosen = logits.topk(top_k, dim=-1).indices.unique().numel()
        self.distinct_by_tokens.setdefault(logits.shape[0], []).append(chosen)


def fill(model: nn.Module) -> None:
    """Weights as `gpu/weights.py` makes them, before vLLM repacks them; buffers keep what the model put there."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        _fill(name, parameter.data)


def _fill(name: str, tensor: Tensor) -> None:
    leaf = name.rpartition(".")[2]
    gain = SHIFT if any(part in name for part in TO_STREAM) else 1.0
    if leaf.endswith("qweight"):
        tensor.random_(-(2**31), 2**31)
    elif leaf.endswith("qzeros"):
        tensor.fill_(ZERO_POINTS)
    elif not tensor.is_floating_point():
        pass  # indices of a sorted order, which these checkpoints do not have
    elif leaf.endswith("scales"):  # [.., inputs / GROUP, outputs], of either sign
        size = gain * (tensor.shape[-2] * GROUP) ** -0.5 / CODE_RMS[Kind.INT4]
        tensor.bernoulli_(0.5).sub_(0.5).mul_(2 * size)
    elif leaf == "A_log":
        tensor.uniform_(0.01, 15.0).log_()
    elif leaf == "dt_bias":
        tensor.normal_(-4.0, 1.0)
    elif "conv1d" in name:
        tensor.normal_(0.0, 0.5)
    elif "embed_tokens" in name:
        tensor.normal_()
    elif tensor.dim() > 1:  # [.., outputs, inputs]
        tensor.normal_(0.0, gain * tensor.shape[-1] ** -0.5)
    elif "linear_attn.norm" in name:
        tensor.fill_(1.0)
    else:  # other norms multiply by one more than their weight; biases
        tensor.zero_()


def register() -> None:
    loaders: Any = import_module("vllm.model_executor.model_loader")

    class SpreadLoader(loaders.BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """Nothing to download."""

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            fill(model)

    loaders.register_model_loader(LOAD_FORMAT)(SpreadLoader)


if find_spec("vllm") is not None:
    register()
