"""The tensors a sequence's past lives in: KV pages for attention layers, recurrent slots for DeltaNet layers.

Who owns which page or slot is the engine's business; here are only the tensors and their sizes.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stoker.backends.family import PAGE_SIZE
from stoker.backends.network.deltanet import DeltaState, commit
from stoker.backends.network.recurrence import Recurrence
from stoker.engine.config import EngineConfig
from stoker.errors import RequestError
from stoker.sizes.memory import cpu_ring
from stoker.weights.model_config import FULL, DeltaConfig, ModelConfig

FP8 = torch.float8_e4m3fn
KV_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": FP8}


@dataclass(frozen=True)
class KVPages:
    """Keys and values of one attention layer, [pages, page_size, kv_heads, D] each.

    Stored in FP8 they have a scale per token and head, [pages, page_size, kv_heads]: what a key is stored as depends
    on that key alone, never on the drafts beside it.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @classmethod
    def allocate(
        cls, pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> "KVPages":
        """Stored in `dtype`: bf16, fp32, or float8_e4m3fn, which brings scales along."""
        if dtype not in (torch.bfloat16, torch.float16, torch.float32, FP8):
            raise RequestError(f"keys and values are to be stored as {dtype}, expected bfloat16, float32 or {FP8}.")

        # zeros, not empty: masked keys are multiplied by an exact 0, which a stray NaN would survive
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(pages, PAGE_SIZE, kv_heads, *shape, dtype=dtype, device=device)

        keys, values = zeros(head_dim, dtype=dtype), zeros(head_dim, dtype=dtype)
        if dtype != FP8:
            return cls(keys, values)
        return cls(keys, values, zeros(dtype=torch.bfloat16), zeros(dtype=torch.bfloat16))


def allocate_delta_state(
    slots: int, window: int, delta: DeltaConfig, dtype: torch.dtype, device: torch.device | str
) -> DeltaState:
    """`window` is the longest step of one sequence, drafts included."""
    ring = cpu_ring(window, delta.conv_kernel)
    fed = 2 * delta.key_heads * delta.key_dim + delta.value_heads * (delta.value_dim + 2)

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(slots, *shape, dtype=dtype, device=device)

    return DeltaState(
        recurrent=zeros(delta.value_heads, delta.key_dim, delta.value_dim, dtype=torch.float32),
        inputs=zeros(ring, delta.conv_channels),
        pending=zeros(ring, fed, dtype=torch.float32),
    )


@dataclass(frozen=True)
class Snapshots:
    """Copies of recurrent state to go back to: per DeltaNet layer, conv [n, W - 1, C] and recurrent [n, HV, K, V]."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    positions: list[int]  # tokens each of them holds

    @classmethod
    def allocate(cls, cache: "Cache", count: int) -> "Snapshots":
        def empty(state: DeltaState) -> tuple[Tensor, Tensor]:
            carried = cache.recurrence.kernel - 1
            return (
                state.inputs.new_zeros(count, carried, state.inputs.shape[2]),
                state.recurrent.new_zeros(count, *state.recurrent.shape[1:]),
            )

        return cls(tuple(empty(state) for state in cache.delta_states), [0] * count)

    def save(self, cache: "Cache", slot: int, index: int, pending: int = 0) -> None:
        """Copies the state with the first `pending` tokens of the slot's last step in it; the slot stays as it is."""
        self.positions[index] = position = cache.recurrence.position(slot) + pending
        commits = cache.recurrence.copying(slot, pending)
        carried = cache.recurrence.carried(slot, position)
        for (conv, recurrent), state in zip(self.layers, cache.delta_states, strict=True):
            conv[index] = state.inputs.flatten(0, 1)[carried]
            recurrent[index] = state.recurrent[slot]
            commit(replace(state, recurrent=recurrent[index : index + 1]), commits)

    def restore(self, cache: "Cache", slot: int, index: int) -> None:
        position = self.positions[index]
        cache.recurrence.reset(slot, position)
        carried = cache.recurrence.carried(slot, position)
        for (conv, recurrent), state in zip(self.layers, cache.delta_states, strict=True):
            state.inputs.flatten(0, 1)[carried] = conv[index]
            state.recurrent[slot] = recurrent[index]


@dataclass(frozen=True)
class Cache:
    """State of every trunk layer, in layer order."""

    layers: tuple[KVPages | DeltaState, ...]
    recurrence: Recurrence  # which tokens the recurrent slots hold

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
        kv_dtype: torch.dtype | None = None,
    ) -> "Cache":
        """`dtype` is that of the activations, `kv_dtype` what keys and values are stored in if not in that."""

        def state(kind: str) -> KVPages | DeltaState:
            if kind == FULL:
                return KVPages.allocate(pages, config.num_kv_heads, config.head_dim, kv_dtype or dtype, device)
            assert config.delta is not None
            return allocate_delta_state(slots, window, config.delta, dtype, device)

        kernel = config.delta.conv_kernel if config.delta else 1
        recurrence = Recurrence(slots, window, kernel, device)
        return cls(tuple(state(kind) for kind in config.layer_types), recurrence)

    @classmethod
    def of_engine(cls, config: ModelConfig, engine: EngineConfig, dtype: torch.dtype, device: torch.device) -> "Cache":
        return cls.allocate(
            config,
            pages=engine.pages,
            slots=engine.slots,
            window=engine.window,
            dtype=dtype,
            device=device,
            kv_dtype=KV_DTYPES[engine.kv_dtype] if engine.kv_dtype else None,
        )

    @property
    def delta_states(self) -> list[DeltaState]:
        return [layer for layer in self.layers if isinstance(layer, DeltaState)]

    def snapshots(self, count: int) -> Snapshots:
        """Room for so many copies of a slot."""
        return Snapshots.allocate(self, count)

    def settle(self, slot: int, accepted: int) -> None:
        """Makes everything up to the first `accepted` tokens of the slot's last step part of its state.

        Steps that follow are then computed from there: bit for bit as before only if that is a multiple of 16.
        """
        commits = self.recurrence.flush(slot, accepted)
        for state in self.delta_states:
            commit(state, commits)

    def reset(self, slot: int) -> None:
        """Makes a recurrent slot ready for a new sequence. KV pages need nothing: unwritten keys are never seen."""
        self.recurrence.reset(slot)
        for state in self.delta_states:
            state.inputs[slot].zero_()
            state.recurrent[slot].zero_()
