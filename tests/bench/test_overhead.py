"""What the client says about itself, and power through a stand-in for NVML."""

import asyncio
import ctypes
import time
from typing import Any

import pytest

from stoker.bench.overhead import Overhead, Power


class Nvml:
    """Two boards of 150 W."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        device._obj.value = index + 1
        return 0

    def nvmlDeviceGetName(self, device: ctypes.c_void_p, name: Any, length: int) -> int:
        name.value = b"GB10"
        return 0

    def nvmlDeviceGetPowerUsage(self, device: ctypes.c_void_p, milliwatts: Any) -> int:
        milliwatts._obj.value = 150_000
        return 0


def test_power_is_the_sum_of_the_boards():
    power = Power(Nvml())  # type: ignore[arg-type]
    assert power.names == ["GB10", "GB10"]
    assert power.watts() == pytest.approx(300)


def test_a_client_that_is_busy_says_so():
    async def run(busy_s: float) -> Overhead:
        overhead = Overhead()
        with overhead.measuring(Power(Nvml())):  # type: ignore[arg-type]
            for _ in range(12):
                time.sleep(busy_s)  # the event loop stands still
                await asyncio.sleep(0.02)
        return overhead

    busy = asyncio.run(run(0.1)).client([])
    assert busy.lag_p50_s is not None
    assert busy.lag_p50_s > 0.02
    calm = asyncio.run(run(0.0))
    assert calm.watts
    assert calm.watts[0] == pytest.approx(300)
