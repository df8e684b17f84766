"""What the client says about itself, and power of cards that are stand-ins."""

import asyncio
import time

import pytest

from stoker.bench.overhead import Overhead, Power
from stoker.cards import Card


class Board(Card):
    """Of 150 W."""

    def watts(self) -> float:
        return 150.0


BOARDS = [Board("GB10", 0, 0), Board("GB10", 0, 0)]


def test_power_is_the_sum_of_the_boards():
    power = Power(BOARDS)
    assert power.names == ["GB10", "GB10"]
    assert power.watts() == pytest.approx(300)


def test_a_client_that_is_busy_says_so():
    async def run(busy_s: float) -> Overhead:
        overhead = Overhead()
        with overhead.measuring(Power(BOARDS)):
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
