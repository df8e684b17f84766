"""Runs a suite's cells against a mock and gives back the document, as the command would write it."""

from datetime import UTC, datetime
from typing import Any

from stoker.bench.document import document
from stoker.bench.environment import environment
from stoker.bench.journal import Journal
from stoker.bench.record import Document, Request, Workload
from stoker.bench.run import Runner, Watcher
from stoker.bench.suites import Cell, Options, Plan
from stoker.bench.target import Target
from tests.bench.mock import Mock, expected


async def bench(mock: Mock, cell: Cell, timeout: float = 30.0, **settings: Any) -> Document:
    """Without a warm-up, so that the mock's record holds the measured requests and nothing else."""
    clock: dict[str, Any] = {"clock": mock.clock} if mock.clock else {}
    async with Target(mock.url, timeout=timeout, **clock, **settings) as target:
        runner = Runner([target], Plan([cell]), Options(), Journal(None, {}, Request), "salt")
        watcher = _Forgetful(mock)
        runner.watcher = watcher
        await runner.run()
        facts = environment(datetime.now(UTC), [], [target.facts()], runner.overhead.client(runner.requests))
        return document("test", runner.requests, facts, not runner.interrupted, [])


class _Forgetful(Watcher):
    """Empties the mock's record after the warm-up round."""

    def __init__(self, mock: Mock) -> None:
        self._mock = mock

    def round_done(self, cell: Any, server: str, number: int, requests: Any) -> None:
        if number == 0:
            self._mock.forget()


def check(row: Workload, mock: Mock, tolerance: float = 0.02) -> None:
    """Counts exactly, figures within the tolerance of what the mock did."""
    assert (row.completed, row.failed) == (len(mock.good), len(mock.truths) - len(mock.good))
    wrong = []
    for name, truth in expected(mock.good):
        reported: Any = row
        for part in name.split("."):
            reported = getattr(reported, part)
        if reported is None or abs(reported / truth - 1) > tolerance:
            wrong.append(f"{name}: reported {reported}, truth {truth:.5f}")
    assert not wrong, "; ".join(wrong)
