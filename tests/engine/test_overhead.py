"""What a step costs beside the model depends on what runs, not on what has run, nor on how long the texts are.

Counted, not timed: elements read of long lists, Python calls, bytes allocated; benchmarks/server/overhead.py
has the times.
"""

import gc
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stoker.engine.engine import Engine, EngineConfig
from stoker.engine.event import Finish
from stoker.engine.request import Request
from stoker.sampling.sampler import Extended
from stoker.sampling.settings import Sampling
from tests.engine.drive import engine_on
from tests.engine.mock import VOCAB, MockDrafter, MockModel, answer
from tests.support.extent import ALL

DEPTH = 4
BATCH = 8


def new_engine(pages: int, snapshots: int = 0) -> Engine:
    config = EngineConfig(pages, BATCH, DEPTH, prefill_budget=1 << 16, snapshots=snapshots, snapshot_interval=1 << 16)
    return engine_on(MockModel().decoder, config, MockDrafter(DEPTH, wrong=7))


class Watched(list):
    """A list that counts the elements it hands out."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        Watched.read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[Any]:
        Watched.read += len(self)
        return super().__iter__()


def watch(request: Request) -> None:
    request.prompt, request.pages = Watched(request.prompt), Watched(request.pages)
    request.output = Watched(request.output)
    request.tokens = Extended(request.prompt, request.output)


def calls_in(work: Callable[[], object]) -> int:
    """Calls of Python and C functions."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def cost(context: int, sampling: Sampling, steps: int = 64) -> tuple[float, float, int]:
    """-> elements read and calls per step, and the most bytes of Python objects a step had in the air."""
    engine = new_engine(pages=BATCH * (context // 64 + 20), snapshots=BATCH)
    for index in range(BATCH):
        engine.submit([(index + place) % VOCAB for place in range(context)], sampling, DEPTH)
    while any(not request.output for request in engine.scheduler):
        engine.step()
    for _ in range(30):  # every request has its first snapshot in its output, which pins all pages before it
        engine.step()
    for request in engine.scheduler:
        watch(request)
    Watched.read = 0
    tracemalloc.start()
    calls = calls_in(lambda: [engine.step() for _ in range(steps)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return Watched.read / steps, calls / steps, peak


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=600),
        Sampling(max_tokens=600, temperature=0.8, top_k=20, presence_penalty=0.3, repetition_penalty=1.1),
    ],
)
def test_a_step_costs_the_same_behind_a_long_text_as_behind_a_short_one(sampling: Sampling) -> None:
    read, calls, peak = cost(256, sampling)
    long_read, long_calls, long_peak = cost(256 * 40, sampling)
    # a snapshot every 64 tokens lists its pages: that much grows, by less than a dozen numbers per step and request
    assert long_read <= read + BATCH * (256 * 40 / 64) * (DEPTH + 1) / 64
    assert read <= 12 * BATCH * (DEPTH + 1)
    assert long_calls == pytest.approx(calls, rel=0.02)
    assert long_peak <= peak + 64 * 1024


def test_thousands_of_requests_leave_nothing_behind() -> None:
    goals = (1000, 2000, 10_000) if ALL else (300, 600, 3000)
    engine = new_engine(pages=64, snapshots=4)
    rng = random.Random(0)
    expected: dict[int, list[int]] = {}
    counts = dict.fromkeys(Finish, 0)
    memory: list[int] = []
    calls: list[int] = []
    submitted = 0

    def submit() -> None:
        nonlocal submitted
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 150))]
        tokens = rng.randrange(1, 12)
        expected[engine.submit(prompt, Sampling(max_tokens=tokens), rng.randrange(DEPTH + 1))] = answer(prompt, tokens)
        submitted += 1

    def probe() -> None:
        """With the same eight requests from the start: bytes in use, and calls of their first steps."""
        while not engine.idle:
            take(engine.step())
        gc.collect()
        memory.append(tracemalloc.get_traced_memory()[0])
        for index in range(BATCH):
            expected[engine.submit([index] * 20, Sampling(max_tokens=9), DEPTH)] = answer([index] * 20, 9)
        calls.append(calls_in(lambda: take([event for _ in range(2) for event in engine.step()])))

    def take(events: list[Any]) -> None:
        for event in events:
            wanted = expected[event.request_id]
            assert list(event.tokens) == wanted[: len(event.tokens)]
            del wanted[: len(event.tokens)]
            if event.finish:
                counts[event.finish] += 1
                assert event.finish is Finish.LENGTH
                assert not expected.pop(event.request_id)

    tracemalloc.start()
    for goal in goals:
        while submitted < goal:
            while len(engine.scheduler.waiting) < 4:
                submit()
            take(engine.step())
            if rng.random() < 0.05:
                request = rng.choice(list(expected))
                event = engine.cancel(request)
                assert event is not None
                counts[Finish.CANCELLED] += 1
                del expected[request]
        probe()
    while not engine.idle:
        take(engine.step())
    tracemalloc.stop()
    engine.check_integrity()
    assert not expected
    assert sum(counts.values()) == submitted + 3 * BATCH > goals[-1]
    assert counts[Finish.CANCELLED] > goals[-1] / 100
    assert memory[2] - memory[1] < 16 * 1024  # two bytes a request would already be more, seven where they are fewer
    assert calls[2] == pytest.approx(calls[1], rel=0.02)
    totals = engine.stats().totals
    assert sum(totals.finished.values()) == sum(counts.values())
