"""What an engine that does not work looks like from outside, and how soon it is found."""

import asyncio
import time
from typing import Any

import pytest
from aiohttp import ClientConnectionError

from stoker.engines.engine import Counters, Deployment, Launch, Phase
from stoker.up.watch import POWER_READINGS, Fault, Power, Progress, Timing, watch

TIMING = Timing(poll_s=0.01, answer_s=60.0, silent_s=0.3)


class Engine:
    """Answers as it is told."""

    def __init__(self, status: int = 200, found: Counters | None = None, **changes: Any) -> None:
        self.status, self.found = status, found or Counters(0, 0.0)
        self.phase: Phase | None = None
        self.restarts, self.hangs, self.refuses = 0, False, False
        for name, value in changes.items():
            setattr(self, name, value)

    async def health(self) -> int:
        if self.hangs:
            await asyncio.sleep(3600)
        if self.refuses:
            raise ClientConnectionError
        return self.status

    async def ready(self) -> tuple[bool, Phase | None]:
        return False, self.phase

    async def metrics(self) -> tuple[Counters | None, int]:
        return self.found, self.restarts


def watched(engine: Any, for_s: float = 3.0, waiting: int = 0, idle: bool = False, **changes: Any) -> tuple[str, float]:
    """Why it would be ended, and after how many seconds; nothing if it would not be within `for_s`."""
    deployment = Deployment("r", "h", "stoker", (Launch(("x",)),), "m", **{"stall_s": 0.4, **changes})
    began = time.monotonic()

    async def run() -> None:
        async with asyncio.timeout(for_s):
            await watch(
                engine, deployment, TIMING, lambda: waiting, engine.__dict__.setdefault("told", []).append,
                lambda busy: None, lambda: idle,
            )  # fmt: skip

    try:
        asyncio.run(run())
    except Fault as fault:
        return str(fault), time.monotonic() - began
    except TimeoutError:
        pass
    return "", time.monotonic() - began


@pytest.mark.parametrize("how", ["hangs", "refuses"])
def test_a_silent_engine_is_found_when_its_time_is_over_however_long_a_question_may_take(how):
    engine = Engine()
    setattr(engine, how, True)
    fault, seconds = watched(engine, for_s=30.0)
    assert "did not answer /health and /metrics for 0 s, and 0.3 s are allowed: it is wedged" in fault
    assert 0.3 <= seconds < 10.0


def test_an_engine_that_says_it_is_down_is_found_and_one_that_starts_again_is_left_alone():
    assert "answered /health with 503" in watched(Engine(status=503))[0]
    loading = Engine(status=503, phase=Phase("loading"))
    assert watched(loading, for_s=0.8)[0] == ""
    assert "answered /health with 503" in watched(loading, start_timeout_s=0.5)[0]


def test_no_progress_while_requests_run_is_a_fault_and_without_requests_none():
    assert watched(Engine(), for_s=0.8)[0] == ""
    assert "no token came" in watched(Engine(found=Counters(1, 7.0)))[0]
    assert "no token came" in watched(Engine(), waiting=1)[0], "by the front's own count, too"


def test_patience_is_half_where_the_card_draws_no_power_either():
    stalled = Engine(found=Counters(1, 7.0))
    fault, _ = watched(stalled, idle=True)
    assert "0.2 s are allowed where the card draws little power" in fault
    assert watched(Engine(), for_s=0.8, idle=True)[0] == "", "as it does when nothing runs"


def test_restarts_that_the_server_makes_by_itself_are_told():
    engine = Engine(restarts=2)
    watched(engine, for_s=0.2)
    assert engine.told == [], "those before it was watched are not counted"  # type: ignore[attr-defined]

    async def metrics() -> tuple[Counters, int]:
        engine.restarts += 1
        return Counters(0, 0.0), min(engine.restarts, 5)

    engine.metrics = metrics  # type: ignore[method-assign]
    watched(engine, for_s=0.3)
    assert sum(engine.told) == 2  # type: ignore[attr-defined]


def test_progress_counts_from_when_work_last_grew():
    progress = Progress(0.0)
    assert progress.see(1, Counters(1, 5.0), 10.0) == 0.0
    assert progress.see(1, Counters(1, 5.0), 30.0) == 20.0
    assert progress.see(1, Counters(1, 6.0), 40.0) == 0.0
    assert progress.see(0, Counters(0, 6.0), 90.0) == 0.0
    assert progress.see(1, None, 99.0) == 0.0, "an engine that tells no counters is not judged by them"


def test_backoff_doubles_up_to_a_minute():
    assert [Timing().backoff(number) for number in (1, 2, 3, 7, 100)] == [1.0, 2.0, 4.0, 60.0, 60.0]


class Card:
    name = "card"

    def __init__(self, watts: float, limit: float | None = 300.0) -> None:
        self._watts, self._limit = watts, limit

    def watts(self) -> float:
        return self._watts

    def power_limit(self) -> float | None:
        return self._limit


@pytest.mark.parametrize(
    ("cards", "low"),
    [
        ([Card(30)], True),
        ([Card(40)], False),
        ([Card(30), Card(200)], False),
        ([Card(19, None)], True),
        ([Card(21, None)], False),
        ([Card(0)], False),  # it tells nothing
    ],
)
def test_little_power_for_a_minute_of_requests_is_a_warning(cards: Any, low: bool):
    power = Power()
    for _ in range(POWER_READINGS - 1):
        power.read(cards, True)
    assert not power.warning
    power.read(cards, True)
    assert (power.idle, "check its power supply" in power.warning) == (low, low)
    power.read(cards, False)
    assert not power.idle
