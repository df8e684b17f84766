"""Weights on their way to a GPU: page-locked memory that reader threads fill and the card copies from by itself.

From ordinary memory the host copies every byte once more, in the thread that hands out the tensors, and waits for it.
The memory is a ring: a place is used again once the card has copied what lay there.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stoker.weights.direct import ALIGN
from stoker.weights.headers import TensorInfo
from stoker.weights.reader import DTYPES

SIZE = 128 << 20  # bytes of the ring: the reader asks for 32 MiB ahead, the rest is on its way to the card
EVERY = 8 << 20  # bytes after which the card is asked to say how far it is


class Mark(Protocol):
    """A point in the card's work, such as a CUDA event."""

    def synchronize(self) -> None: ...


@dataclass(slots=True)
class _Place:
    start: int  # bytes given out before it, laps of the ring counted
    bytes: int
    sent: bool = False
    mark: Mark | None = None


class Staging:
    """One reader's; all calls come from the thread that reads."""

    def __init__(self, device: torch.device, size: int = SIZE) -> None:
        self._device, self._size = device, size // ALIGN * ALIGN
        memory = self._allocate(self._size + ALIGN)
        self._memory = memory[-memory.data_ptr() % ALIGN :]
        self._head = 0  # where the next tensor goes, laps counted
        self._places: deque[_Place] = deque()  # in use, oldest first
        self._by_address: dict[int, _Place] = {}  # given out and not sent yet
        self._unmarked: list[_Place] = []  # sent since the last mark
        self._unmarked_bytes = 0

    def take(self, info: TensorInfo) -> Tensor | None:
        """Memory for a tensor, where a direct read can write to it; None if there is none free just now."""
        shift = info.offset % ALIGN
        need = -(-(shift + info.nbytes) // ALIGN) * ALIGN
        if not info.nbytes or need > self._size // 4 or info.offset % DTYPES[info.dtype].itemsize:
            return None
        start = self._head
        if start % self._size + need > self._size:
            start += -start % self._size
        if not self._free(start + need - self._size):
            return None
        place = _Place(start, need)
        self._places.append(place)
        self._head = start + need
        begin = start % self._size + shift
        tensor = self._memory[begin : begin + info.nbytes].view(DTYPES[info.dtype]).view(info.shape)
        self._by_address[tensor.data_ptr()] = place
        return tensor

    def send(self, values: Tensor, target: Tensor) -> None:
        """What was read goes to its place on the card; from memory of this ring, without waiting for it."""
        place = self._by_address.pop(values.data_ptr(), None)
        target.copy_(values, non_blocking=place is not None)
        if place is not None:
            place.sent = True
            self._unmarked.append(place)
            self._unmarked_bytes += place.bytes
            if self._unmarked_bytes >= EVERY:
                self._set_mark()

    def finish(self) -> None:
        """Waits until the card has everything that was sent."""
        self._set_mark()
        while self._places and (mark := self._places.popleft().mark):
            mark.synchronize()

    def _free(self, stop: int) -> bool:
        """Waits until the card has what was given out before `stop`. False if some of it has not been sent yet."""
        while self._places and self._places[0].start < stop:
            oldest = self._places[0]
            if not oldest.sent:
                return False
            if oldest.mark is None:
                self._set_mark()
            assert oldest.mark is not None
            oldest.mark.synchronize()
            self._places.popleft()
        return True

    def _set_mark(self) -> None:
        mark = self._mark()
        for place in self._unmarked:
            place.mark = mark
        self._unmarked, self._unmarked_bytes = [], 0

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def _mark(self) -> Mark:
        event: Mark = torch.cuda.current_stream(self._device).record_event()
        return event
