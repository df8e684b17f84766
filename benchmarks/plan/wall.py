"""Fixed and adaptive depth on this machine by the wall clock: one engine per way of drafting, one request at a time.

Ways take turns, round after round, so that what else the machine does falls on all of them alike; the spread over the
rounds is the noise. Decode only: a request's clock starts with its first token.
"""

import os
import platform
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.plan.traces import Task, tasks_of
from stoker.backends.cpu.build import cpu_backend
from stoker.backends.family import PAGE_SIZE
from stoker.backends.network.load import load_model
from stoker.engine.config import EngineConfig
from stoker.engine.engine import Engine
from stoker.engine.event import AUTO
from stoker.sampling.settings import Sampling
from stoker.speculate.choice import DraftChoice

PLAIN = "none"
DRAFTS = (PLAIN, "mtp:1", "mtp:2", "mtp:4", "mtp:auto", "dflash:2", "dflash:4", "dflash:auto", "lookup+mtp:auto")
HOT = Sampling(temperature=2.0, seed=11)  # hard to guess, though drafters share the noise


@dataclass
class Way:
    engine: Engine
    choice: DraftChoice
    speeds: dict[str, list[float]] = field(default_factory=dict)  # tokens/s of each round, by kind
    steps: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    answers: dict[int, list[int]] = field(default_factory=dict)  # by task

    def run(self, kind: str, tasks: list[tuple[int, Task]]) -> None:
        """One round over the tasks of a kind."""
        seconds, made = 0.0, 0
        for number, task in tasks:
            depth = AUTO if self.choice.adaptive else self.choice.depth
            self.engine.submit(task.prompt, replace(task.sampling, max_tokens=task.tokens), depth)
            answer: list[int] = []
            while not self.engine.idle:
                started = time.perf_counter()
                fresh = [token for event in self.engine.step() for token in event.tokens]
                if answer:
                    seconds += time.perf_counter() - started
                    made += len(fresh)
                    self.steps[kind] = self.steps.get(kind, 0) + 1
                answer += fresh
            self.answers[number] = answer
        self.tokens[kind] = self.tokens.get(kind, 0) + made
        self.speeds.setdefault(kind, []).append(made / seconds)


def measure(model: Path, data: Path, texts: int, tokens: int, rounds: int) -> dict[str, Any]:
    tasks = tasks_of(model, data, texts, tokens)
    tasks += [replace(task, kind="hot", sampling=HOT) for task in tasks if task.kind == "prose"]
    longest = max(len(task.prompt) + task.tokens for task in tasks)
    pages = -(-longest // PAGE_SIZE) + 1
    loaded = load_model(model).model
    ways: dict[str, Way] = {}
    for draft in DRAFTS:
        choice = DraftChoice.parse(draft)
        config = EngineConfig(pages=pages, slots=1, max_depth=choice.depth)
        backend, drafter = cpu_backend(loaded, config, choice, model)
        ways[draft] = Way(Engine(config, backend, drafter), choice)
    numbered = list(enumerate(tasks))
    kinds = list(dict.fromkeys(task.kind for task in tasks))
    ways[PLAIN].run("warm-up", numbered[:1])
    for _ in range(rounds):
        for kind in kinds:
            for way in ways.values():
                way.run(kind, [(number, task) for number, task in numbered if task.kind == kind])
    rows = [_row(draft, kind, way, ways[PLAIN]) for kind in kinds for draft, way in ways.items()]
    equal = sum(way.answers[n] == ways[PLAIN].answers[n] for way in ways.values() for n, _ in numbered)
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}; torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads",
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "rounds": rounds,
        "answers_identical": f"{equal} of {len(ways) * len(numbered)}",
        "rows": rows,
    }


def _row(draft: str, kind: str, way: Way, plain: Way) -> dict[str, Any]:
    speeds = way.speeds[kind]
    over = [own / base for own, base in zip(speeds, plain.speeds[kind], strict=True)]
    return {
        "text": kind,
        "draft": draft,
        "tokens_per_s": round(statistics.median(speeds), 1),
        "low": round(min(speeds), 1),
        "high": round(max(speeds), 1),
        "tokens_per_step": round(way.tokens[kind] / way.steps[kind], 2),
        "over_plain": round(statistics.median(over), 3),
    }


def show(report: dict[str, Any]) -> None:
    print(f"\nMeasured on this machine ({report['machine']}; load {report['load_average'][0]}), tokens/s, decode only,")
    print(f"median of {report['rounds']} rounds; answers identical: {report['answers_identical']}\n")
    print(f"{'text':>8}{'draft':>18}{'tokens/s':>10}{'low':>8}{'high':>8}{'per step':>10}{'x plain':>9}")
    for row in report["rows"]:
        print(
            f"{row['text']:>8}{row['draft']:>18}{row['tokens_per_s']:10.1f}{row['low']:8.1f}{row['high']:8.1f}"
            f"{row['tokens_per_step']:10.2f}{row['over_plain']:9.2f}"
        )
