"""A run over many cases: a server, clients in processes of their own, a neighbour, and what came of it."""

import datetime
import json
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from tests.server.fuzz.cases import SEED, case
from tests.server.fuzz.client import Result
from tests.server.running import Running

CLIENTS = 4
CONTEXT = 2048
NAMES = ("demo", "other")
WARM_UP = 1_000_000  # the first number of the cases before memory is first looked at
SLOWEST = 20
REST_S = 10.0  # until a server that rests has given freed memory back


@dataclass
class Report:
    cases: int
    seconds: float = 0.0
    statuses: dict[str, dict[str, int]] = field(default_factory=dict)  # counts by endpoint and outcome
    problems: list[Result] = field(default_factory=list)
    slowest: list[tuple[float, int]] = field(default_factory=list)
    neighbour: dict[str, Any] = field(default_factory=dict)
    memory_before: float = 0.0  # MB of all processes
    memory_after: float = 0.0
    restarts: float = 0.0  # of the engine
    tracebacks: int = 0  # in the server's log

    @property
    def gap(self) -> float:
        """The longest that the neighbour's stream stood still."""
        return max((seconds for seconds, _ in self.neighbour["gaps"]), default=0.0)

    @property
    def health(self) -> float:
        """The longest that /health took."""
        return max((seconds for seconds, _ in self.neighbour["health"]), default=0.0)

    def count(self, *outcomes: str) -> int:
        return sum(counts.get(each, 0) for counts in self.statuses.values() for each in outcomes)

    def document(self, command: str) -> dict[str, Any]:
        packages = ("fastapi", "starlette", "uvicorn", "h11", "pydantic", "llguidance", "tokenizers", "torch")
        return {
            "command": command,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
            "seed": SEED,
            "clients": CLIENTS,
            "largest_neighbour_gap_s": self.gap,
            "slowest_health_s": self.health,
            **asdict(self),
        }


def run(cases: int, warm_up: int, patience: float = 60.0) -> Report:
    """Without `warm_up` memory is not looked at: what a server keeps for good it takes during its first requests."""
    names = [option for name in NAMES for option in ("--served-model-name", name)]
    server = Running("--model", "demo", "--users", "4", "--context", str(CONTEXT), *names)
    try:
        server.wait()
        report = Report(cases)
        if warm_up:
            fill_caches(server)
            list(send(server.url, WARM_UP, warm_up))
            server.until_idle()
            time.sleep(REST_S)
            report.memory_before = server.memory
        began = time.monotonic()
        with watched(server.url) as seen:
            collect(report, send(server.url, 0, cases))
        report.neighbour, report.seconds = seen, round(time.monotonic() - began, 1)
        server.until_idle()
        if warm_up:
            report.memory_after = settled(server, report.memory_before, patience)
        report.restarts = server.gauges()["stoker:engine_restarts_total"]
        report.tracebacks = server.log.count("Traceback")
        if report.tracebacks:
            print(server.log[-20_000:])
        return report
    finally:
        assert server.stop() == 0


def send(url: str, first: int, cases: int) -> Iterator[Result]:
    """Each client takes every CLIENTS-th case."""
    command = [sys.executable, "-m", "tests.server.fuzz.client", url]
    clients = [
        subprocess.Popen([*command, str(first + place), str(first + cases), str(CLIENTS)], stdout=subprocess.PIPE)
        for place in range(CLIENTS)
    ]
    try:
        for client in clients:
            assert client.stdout is not None
            for line in client.stdout:
                yield Result(**json.loads(line))
            assert client.wait() == 0, "a client of the test failed"
    finally:
        for client in clients:
            client.kill()
            client.wait()


def collect(report: Report, results: Iterator[Result]) -> None:
    for result in results:
        counts = Counter(report.statuses.get(result.endpoint, {}))
        counts[result.outcome] += 1
        report.statuses[result.endpoint] = dict(sorted(counts.items()))
        report.slowest = sorted([*report.slowest, (result.seconds, result.number)], reverse=True)[:SLOWEST]
        if result.problem:
            report.problems.append(result)
            print(f"{result.problem}\n{case(result.number)}\n", flush=True)


@contextmanager
def watched(url: str) -> Iterator[dict[str, Any]]:
    """What the neighbour saw is there afterwards."""
    seen: dict[str, Any] = {}
    command = [sys.executable, "-m", "tests.server.fuzz.watch", url]
    watch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield seen
        seen |= json.loads(watch.communicate(timeout=120)[0])
    finally:
        watch.kill()
        watch.wait()


def fill_caches(server: Running) -> None:
    """Every page and every state of the prefix cache is touched, so that it grows no more."""
    for number in range(100):
        server.chat(f"Question {number}", max_tokens=1)
    for number in range(2 * int(server.gauges()["stoker:kv_pages"]) * 64 // CONTEXT):
        words = " ".join(f"{number}" for _ in range(CONTEXT))
        tokens = server.post("/tokenize", {"prompt": words}).json()["tokens"]
        server.post("/v1/completions", {"prompt": tokens[: CONTEXT - 1], "max_tokens": 1})


def settled(server: Running, wanted: float, patience: float) -> float:
    """Memory once it is back, or what is left after a while."""
    end = time.monotonic() + patience
    while (found := server.memory) > wanted + 25 and time.monotonic() < end:
        time.sleep(1.0)
    return found
