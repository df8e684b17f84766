"""Which tokens each slot's recurrent state holds, which are pending, and so what a forward has to commit and compute.

The books are plain numbers on the host; what the layers need of them is made into index tensors once per forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from stoker.backends.family import STEP_CHUNK, Family
from stoker.backends.network.batch import Batch
from stoker.backends.network.deltanet import ChunkPass, Plan, PrefillPlan, StepPlan
from stoker.sizes.memory import cpu_ring


@dataclass(frozen=True)
class Span:
    """Tokens start .. stop - 1 of one slot that are computed from the state at `base`."""

    slot: int
    base: int
    stop: int

    @property
    def first(self) -> int:
        return self.base // STEP_CHUNK

    @property
    def chunks(self) -> int:
        return -(-self.stop // STEP_CHUNK) - self.first if self.stop > self.base else 0


class Recurrence:
    """`base` tokens are in a slot's state; `held` more were accepted when its last step began."""

    def __init__(self, slots: int, window: int, kernel: int, device: torch.device | str) -> None:
        self.window, self.kernel, self._device = window, kernel, device
        self._ring = cpu_ring(window, kernel)
        self.base, self.held = [0] * slots, [0] * slots

    def reset(self, slot: int, position: int = 0) -> None:
        self.base[slot], self.held[slot] = position, 0

    def begin(self, batch: Batch) -> Plan:
        """What a forward over `batch` has to do. The books then stand as after it."""
        slots, cached, starts = batch.slots.tolist(), batch.cached.tolist(), batch.starts.tolist()
        accepted = [self.held[s] + replay for s, replay in zip(slots, batch.replay.tolist(), strict=True)]
        bases = [at - pending for at, pending in zip(cached, accepted, strict=True)]
        if batch.family is Family.PREFILL:
            spans = [Span(s, base, at) for s, base, at in zip(slots, bases, cached, strict=True)]
            for slot, at, first, stop in zip(slots, cached, starts, starts[1:], strict=False):
                self.reset(slot, at + stop - first)
            return self._prefill(batch, slots, cached, starts, self._passes(spans))
        self._check_window(starts)
        whole = [max(base, at // STEP_CHUNK * STEP_CHUNK) for base, at in zip(bases, cached, strict=True)]
        spans = [Span(s, base, stop) for s, base, stop in zip(slots, bases, whole, strict=True)]
        for slot, base, at in zip(slots, whole, cached, strict=True):
            self.base[slot], self.held[slot] = base, at - base
        return self._step(slots, cached, starts, whole, self._passes(spans))

    def flush(self, slot: int, accepted: int) -> list[ChunkPass]:
        """Commits all pending tokens, the first `accepted` of the last step included, be it a part of a chunk."""
        base = self.base[slot]
        span = Span(slot, base, self.position(slot) + accepted)
        self.reset(slot, span.stop)
        return self._passes([span])

    def copying(self, slot: int, accepted: int) -> list[ChunkPass]:
        """The same for a copy of the state, whose only slot is 0; the slot itself stays as it is."""
        span = Span(slot, self.base[slot], self.position(slot) + accepted)
        return self._passes([span], slot_of=lambda _: 0)

    def position(self, slot: int) -> int:
        """Tokens accepted when the slot's last step began, or when its prefill ended."""
        return self.base[slot] + self.held[slot]

    def carried(self, slot: int, position: int) -> list[int]:
        """Where the conv inputs before `position` lie among all slots' rings."""
        return [slot * self._ring + p % self._ring for p in range(position - self.kernel + 1, position)]

    def _prefill(
        self, batch: Batch, slots: list[int], cached: list[int], starts: list[int], commits: list[ChunkPass]
    ) -> PrefillPlan:
        taps, tail = batch.conv_inputs(self.kernel)
        before = [self.carried(s, at) for s, at in zip(slots, cached, strict=True)]
        after = [
            self.carried(s, at + stop - first)
            for s, at, first, stop in zip(slots, cached, starts, starts[1:], strict=False)
        ]
        return PrefillPlan(
            commits=commits,
            slots=batch.slots,
            carried=self._tensor(_flat(before)),
            taps=taps,
            tail=tail.flatten(),
            tail_places=self._tensor(_flat(after)),
            rows=batch.chunk_rows,
        )

    def _step(
        self, slots: list[int], cached: list[int], starts: list[int], bases: list[int], commits: list[ChunkPass]
    ) -> StepPlan:
        lengths = [stop - first for first, stop in pairwise(starts)]
        spans = [Span(s, base, at + length) for s, base, at, length in zip(slots, bases, cached, lengths, strict=True)]
        tokens = [(span, at + place) for span, at, n in zip(spans, cached, lengths, strict=True) for place in range(n)]
        places = [span.slot * self._ring + position % self._ring for span, position in tokens]
        back = range(self.kernel - 1, -1, -1)
        taps = [span.slot * self._ring + (position - n) % self._ring for span, position in tokens for n in back]
        return StepPlan(
            commits=commits,
            passes=self._passes(spans),
            places=self._tensor(places),
            taps=self._tensor(taps),
            outputs=self._tensor(_outputs(spans, tokens)),
        )

    def _check_window(self, starts: list[int]) -> None:
        longest = max(stop - first for first, stop in pairwise(starts))
        if longest > self.window:
            raise ValueError(f"a step of {longest} tokens exceeds the {self.window} the cache was made for")

    def _passes(self, spans: Sequence[Span], slot_of: Callable[[int], int] = lambda slot: slot) -> list[ChunkPass]:
        """The spans' chunks, the i-th of every span in the i-th pass."""
        passes: list[ChunkPass] = []
        before: list[Span] = []
        for index in range(max(span.chunks for span in spans)):
            now = [span for span in spans if span.chunks > index]
            ring: list[int] = []
            live: list[list[list[float]]] = []
            for span in now:
                start = (span.first + index) * STEP_CHUNK
                place = span.slot * self._ring + start % self._ring
                ring += range(place, place + STEP_CHUNK)
                live.append([[float(span.base <= p < span.stop) for p in range(start, start + STEP_CHUNK)]])
            picked = None
            if before and len(now) < len(before):
                picked = self._tensor([i for i, span in enumerate(before) if span.chunks > index])
            passes.append(
                ChunkPass(
                    slots=self._tensor([slot_of(span.slot) for span in now]),
                    ring=self._tensor(ring),
                    live=torch.tensor(live, dtype=torch.float32, device=self._device),
                    picked=picked,
                )
            )
            before = now
        return passes

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._device)


def _flat(lists: list[list[int]]) -> list[int]:
    return [number for numbers in lists for number in numbers]


def _outputs(spans: Sequence[Span], tokens: Sequence[tuple[Span, int]]) -> list[int]:
    """Where each (span, position) comes out among the places of all passes, which follow each other as in _passes."""
    first_place: dict[tuple[int, int], int] = {}  # (slot, chunk of the span)
    for index in range(max(span.chunks for span in spans)):
        for span in spans:
            if span.chunks > index:
                first_place[span.slot, index] = len(first_place) * STEP_CHUNK
    return [
        first_place[span.slot, position // STEP_CHUNK - span.first] + position % STEP_CHUNK for span, position in tokens
    ]
