"""The tensors a sequence's past lives in: KV pages for attention layers, recurrent slots for DeltaNet layers.

Who owns which page or slot is the engine's business; here are only the tensors and their sizes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.model.config import FULL, DeltaConfig, ModelConfig

PAGE_SIZE = 64  # tokens per KV page; equal to the DeltaNet chunk, so checkpoints end on page borders


@dataclass(frozen=True)
class KVPages:
    """Keys and values of one attention layer, [pages, page_size, kv_heads, D] each."""

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(
        cls, pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> "KVPages":
        # zeros, not empty: masked keys are multiplied by an exact 0, which a stray NaN would survive
        shape = (pages, PAGE_SIZE, kv_heads, head_dim)
        return cls(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))


@dataclass(frozen=True)
class DeltaState:
    """State of one DeltaNet layer: conv inputs [slots, kernel - 1, C], recurrent [slots, HV, K, V] in fp32."""

    conv: Tensor
    recurrent: Tensor

    @classmethod
    def allocate(cls, slots: int, delta: DeltaConfig, dtype: torch.dtype, device: torch.device | str) -> "DeltaState":
        conv = (slots, delta.conv_kernel - 1, delta.conv_channels)
        recurrent = (slots, delta.value_heads, delta.key_dim, delta.value_dim)
        return cls(
            torch.zeros(conv, dtype=dtype, device=device),
            torch.zeros(recurrent, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True)
class Cache:
    """State of every trunk layer, in layer order."""

    layers: tuple[KVPages | DeltaState, ...]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        *,
        pages: int,
        slots: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> "Cache":
        def state(kind: str) -> KVPages | DeltaState:
            if kind == FULL:
                return KVPages.allocate(pages, config.num_kv_heads, config.head_dim, dtype, device)
            assert config.delta is not None
            return DeltaState.allocate(slots, config.delta, dtype, device)

        return cls(tuple(state(kind) for kind in config.layer_types))

    def reset(self, slot: int) -> None:
        """Makes a recurrent slot ready for a new sequence. KV pages need nothing: unwritten keys are never seen."""
        for layer in self.layers:
            if isinstance(layer, DeltaState):
                layer.conv[slot].zero_()
                layer.recurrent[slot].zero_()
