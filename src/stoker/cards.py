"""NVIDIA cards of this machine through NVML: names, memory and power. None where there is no driver."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Card:
    name: str
    total: int  # bytes; 0 where it shares the host's memory
    free: int
    handle: Any = None  # NVML's

    def watts(self) -> float:
        """Board power; 0 where it is not measured."""
        import pynvml

        with suppress(pynvml.NVMLError):
            return float(pynvml.nvmlDeviceGetPowerUsage(self.handle)) / 1000
        return 0.0

    def power_limit(self) -> float:
        """W; 0 where there is none."""
        import pynvml

        with suppress(pynvml.NVMLError):
            return float(pynvml.nvmlDeviceGetEnforcedPowerLimit(self.handle)) / 1000
        return 0.0


def nvidia_cards() -> list[Card]:
    import pynvml

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return []
    cards = []
    for index in range(count):
        with suppress(pynvml.NVMLError):  # a card that has failed does not hide the others
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            cards.append(Card(pynvml.nvmlDeviceGetName(handle), *_memory(handle), handle))
    return cards


def _memory(handle: Any) -> tuple[int, int]:
    """Total and free."""
    import pynvml

    try:
        found = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError:  # not supported where memory is unified
        return 0, 0
    return int(found.total), int(found.free)
