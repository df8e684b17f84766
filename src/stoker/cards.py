"""NVIDIA cards of this machine through NVML: names, memory, power, clocks. None where there is no driver."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

# Why a card does not run at its highest clock, as NVML's bits say it. An idle card, and clocks that somebody set, are
# none of them.
POWER_LIMIT = "its power limit"
REASONS = {
    0x04: POWER_LIMIT,
    0x08: "a hardware slowdown",
    0x20: "its temperature (driver)",
    0x40: "its temperature (hardware)",
    0x80: "the power supply (hardware power brake)",
}


@dataclass(frozen=True)
class CardReading:
    """What a card does now. None: not measured by this card."""

    watts: float | None
    limit_watts: float | None
    default_limit_watts: float | None
    temperature_c: int | None
    clock_mhz: int | None
    highest_clock_mhz: int | None
    memory_clock_mhz: int | None
    busy_percent: int | None
    held_back_by: tuple[str, ...]


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

    def read(self) -> CardReading:
        import pynvml

        def ask(question: Callable[..., Any], *more: Any) -> Any:
            with suppress(pynvml.NVMLError):
                return question(self.handle, *more)
            return None

        default = ask(pynvml.nvmlDeviceGetPowerManagementDefaultLimit)
        busy = ask(pynvml.nvmlDeviceGetUtilizationRates)
        reasons = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons) or 0
        return CardReading(
            watts=self.watts() or None,
            limit_watts=self.power_limit() or None,
            default_limit_watts=default / 1000 if default else None,
            temperature_c=ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
            clock_mhz=ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
            highest_clock_mhz=ask(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM),
            memory_clock_mhz=ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM),
            busy_percent=busy.gpu if busy else None,
            held_back_by=tuple(said for bit, said in REASONS.items() if reasons & bit),
        )


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
