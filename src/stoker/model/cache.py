"""The tensors a sequence's past lives in: KV pages for attention layers, recurrent slots for DeltaNet layers.

Who owns which page or slot is the engine's business; here are only the tensors and their sizes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.model.config import FULL, DeltaConfig, ModelConfig
from stoker.ops.deltanet import DeltaState, commit

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


def allocate_delta_state(
    slots: int, window: int, delta: DeltaConfig, dtype: torch.dtype, device: torch.device | str
) -> DeltaState:
    """`window` is the longest step of one sequence, drafts included."""

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(slots, *shape, dtype=dtype, device=device)

    return DeltaState(
        conv=zeros(delta.conv_kernel - 1, delta.conv_channels),
        recurrent=zeros(delta.value_heads, delta.key_dim, delta.value_dim, dtype=torch.float32),
        pending_inputs=zeros(window, delta.conv_channels),
        pending_k=zeros(window, delta.key_heads, delta.key_dim),
        pending_v=zeros(window, delta.value_heads, delta.value_dim),
        pending_g=zeros(window, delta.value_heads, dtype=torch.float32),
        pending_beta=zeros(window, delta.value_heads, dtype=torch.float32),
    )


@dataclass(frozen=True)
class Snapshots:
    """Copies of recurrent state to go back to: per DeltaNet layer, conv [n, W - 1, C] and recurrent [n, HV, K, V]."""

    layers: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def allocate(cls, cache: "Cache", count: int) -> "Snapshots":
        return cls(
            tuple(
                (
                    state.conv.new_zeros(count, *state.conv.shape[1:]),
                    state.recurrent.new_zeros(count, *state.recurrent.shape[1:]),
                )
                for state in cache.delta_states
            )
        )

    def save(self, cache: "Cache", slot: int, index: int) -> None:
        for (conv, recurrent), state in zip(self.layers, cache.delta_states, strict=True):
            conv[index] = state.conv[slot]
            recurrent[index] = state.recurrent[slot]

    def restore(self, cache: "Cache", slot: int, index: int) -> None:
        for (conv, recurrent), state in zip(self.layers, cache.delta_states, strict=True):
            state.conv[slot] = conv[index]
            state.recurrent[slot] = recurrent[index]


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
        window: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> "Cache":
        def state(kind: str) -> KVPages | DeltaState:
            if kind == FULL:
                return KVPages.allocate(pages, config.num_kv_heads, config.head_dim, dtype, device)
            assert config.delta is not None
            return allocate_delta_state(slots, window, config.delta, dtype, device)

        return cls(tuple(state(kind) for kind in config.layer_types))

    @property
    def window(self) -> int:
        """Tokens of one sequence that a step may hold; without DeltaNet layers there is no limit."""
        return min((state.window for state in self.delta_states), default=1 << 62)

    @property
    def delta_states(self) -> list[DeltaState]:
        return [layer for layer in self.layers if isinstance(layer, DeltaState)]

    def commit(self, slots: Tensor, counts: Tensor) -> None:
        """Makes accepted tokens of the last step part of the state without running another."""
        for state in self.delta_states:
            commit(state, slots, counts)

    def reset(self, slot: int) -> None:
        """Makes a recurrent slot ready for a new sequence. KV pages need nothing: unwritten keys are never seen."""
        for state in self.delta_states:
            state.conv[slot].zero_()
            state.recurrent[slot].zero_()
