"""Where the recurrent state of each slot stands, and copies of it to go back to.

A step leaves its tokens in the ring, and the next one takes them into the state. A copy at a place among them needs
them in the state now: they are taken in ahead of time, by the same kernel on a step without new tokens, so that the
bits are those of the step that would have done it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.backends.gpu.graphs import Recorder, Upload
from stoker.backends.gpu.kernels.deltanet import DeltaRing, Sequences, deltanet
from stoker.backends.gpu.kernels.prefill_deltanet import Kept
from stoker.backends.gpu.state import GpuCache
from stoker.backends.gpu.weights import DeltaLayer, StepWeights
from stoker.backends.network.cache import KVPages


class SlotCache:
    """A cache and, for each slot, how many tokens its state holds."""

    def __init__(self, cache: GpuCache, weights: StepWeights, slots: int) -> None:
        self.tensors = cache
        self._weights = [layer.mixer.weights for layer in weights.layers if isinstance(layer.mixer, DeltaLayer)]
        self._held = [0] * slots  # tokens in the state; those after them are in the ring
        self._begun = [0] * slots  # where the last step began, from which tokens may yet be taken back
        device = weights.embedding.device
        numbers = torch.zeros(4, dtype=torch.int32, device=device)
        self._sequences, self._upload = Sequences(1, *numbers.split(1)), Upload(numbers)
        self._replay: Callable[[], None] = self._take_in
        deltas = cache.deltas
        if deltas is not None:
            heads, _, values = deltas.recurrent.shape[2:]
            inputs = deltas.inputs.shape[3] + heads * values
            self._y = torch.zeros(1, inputs + 2 * heads, device=device)
            self._out = torch.zeros(1, heads * values, dtype=torch.bfloat16, device=device)

    def record(self, recorder: Recorder) -> None:
        """Taking tokens into the state is a launch for each layer: too many for the host to make anew each time."""
        if self.tensors.deltas is not None:
            self._replay = recorder.record(self._take_in)

    @property
    def layers(self) -> tuple[KVPages | DeltaRing, ...]:
        return self.tensors.layers

    def reset(self, slot: int) -> None:
        """KV pages and rings need nothing: what is not written is never seen."""
        self._held[slot] = self._begun[slot] = 0
        if self.tensors.deltas is not None:
            self.tensors.deltas.recurrent[:, slot].zero_()

    def pending(self, slot: int, computed: int) -> int:
        """Tokens before `computed` that the next step must take into the state."""
        return computed - self._held[slot]

    def holds(self, slot: int, cached: int) -> None:
        """A step was launched after `cached` tokens; or a prompt up to there. All of them are in the state now."""
        self._held[slot] = self._begun[slot] = cached

    def settle(self, slot: int, pending: int) -> int:
        """Takes tokens into the state, up to the first `pending` of the last step. -> how many it holds then."""
        position = self._begun[slot] + pending
        replay = position - self._held[slot]
        if replay > 0 and self.tensors.deltas is not None:
            self._upload.open()[:] = slot, position, 0, replay
            self._upload.send()
            self._replay()
        self._held[slot] = position
        return position

    def _take_in(self) -> None:
        rings = (layer for layer in self.layers if isinstance(layer, DeltaRing))
        for ring, weights in zip(rings, self._weights, strict=True):
            deltanet(self._y, self._out, ring, weights, self._sequences)

    def settle_at(self, slot: int, computed: int) -> None:
        """Takes the tokens before `computed` into the state: those of the last step that were accepted."""
        if self.pending(slot, computed):
            self.settle(slot, computed - self._begun[slot])

    def snapshots(self, count: int) -> "GpuSnapshots":
        return GpuSnapshots.allocate(self.tensors.deltas, self._weights[0].conv.shape[0] if self._weights else 1, count)


@dataclass(frozen=True)
class GpuSnapshots:
    """Conv inputs [n, L, W - 1, C] and recurrent states [n, L, HV, K, V] of all DeltaNet layers."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    positions: list[int]  # tokens each of them holds

    @classmethod
    def allocate(cls, deltas: DeltaRing | None, kernel: int, count: int) -> "GpuSnapshots":
        if deltas is None:
            return cls((), [0] * count)
        layers, _, _, channels = deltas.inputs.shape
        conv = deltas.inputs.new_zeros(count, layers, kernel - 1, channels)
        recurrent = deltas.recurrent.new_zeros(count, layers, *deltas.recurrent.shape[2:])
        return cls(((conv, recurrent),), [0] * count)

    def save(self, cache: SlotCache, slot: int, index: int, pending: int = 0) -> None:
        """Keeps the state with the first `pending` tokens of the slot's last step in it."""
        self.positions[index] = position = cache.settle(slot, pending)
        for conv, recurrent in self.layers:
            deltas = cache.tensors.deltas
            assert deltas is not None
            recurrent[index].copy_(deltas.recurrent[:, slot])
            for tap, place in enumerate(self._places(deltas, position)):
                conv[index, :, tap].copy_(deltas.inputs[:, slot, place])

    def kept(self) -> list[Kept] | None:
        """Views of them for each DeltaNet layer, for kernels that make snapshots while a prompt passes through it."""
        if not self.positions or not self.layers:
            return None
        ((conv, recurrent),) = self.layers
        return [Kept(conv[:, layer], recurrent[:, layer]) for layer in range(conv.shape[1])]

    def restore(self, cache: SlotCache, slot: int, index: int) -> None:
        position = self.positions[index]
        cache.holds(slot, position)
        for conv, recurrent in self.layers:
            deltas = cache.tensors.deltas
            assert deltas is not None
            deltas.recurrent[:, slot].copy_(recurrent[index])
            for tap, place in enumerate(self._places(deltas, position)):
                deltas.inputs[:, slot, place].copy_(conv[index, :, tap])

    def _places(self, deltas: DeltaRing, position: int) -> list[int]:
        """In the ring, of the inputs that the conv at `position` reaches back to."""
        carried = self.layers[0][0].shape[2]
        return [(position - carried + tap) % deltas.inputs.shape[2] for tap in range(carried)]
