"""A server whose engine goes wrong when a request asks it to, by its seed, and whose steps take their time.

`STOKER_TEST_CHECK_S` shortens how long a grammar may take to compile, and how long others wait for it."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import stoker.server.lifecycle.run as server
from stoker.cli.main import run as run_command
from stoker.engine.event import Event
from stoker.engine.worker.messages import Loading
from stoker.engine.worker.spec import Buildable, Built
from stoker.sampling.settings import Sampling
from stoker.server.prepare import grammar_check

RAISE, HANG, SLOW = 666, 667, 668  # seeds


@dataclass(frozen=True)
class Faulty:
    spec: Buildable
    pause: float

    def build(self, report: Callable[[Loading], None]) -> Built:
        built = self.spec.build(report)
        engine, submit, step = built.engine, built.engine.submit, built.engine.step
        seeds: list[int] = []

        def watched_submit(prompt: Any, sampling: Sampling, *rest: Any) -> int:
            seeds.append(sampling.seed)
            return submit(prompt, sampling, *rest)

        def faulty_step() -> list[Event]:
            if RAISE in seeds:
                raise ZeroDivisionError("a planted fault")
            if HANG in seeds:
                time.sleep(600)
            if SLOW in seeds:
                time.sleep(self.pause)
            return step()

        engine.submit, engine.step = watched_submit, faulty_step  # type: ignore[assignment, method-assign]
        return built


def run() -> None:
    original = server.serve
    pause = float(os.environ.get("STOKER_TEST_PAUSE", "0.02"))
    if limit := os.environ.get("STOKER_TEST_CHECK_S"):
        grammar_check.CHECK_S, grammar_check.QUEUE_S = float(limit), 2 * float(limit)

    def serve(config: Any, plan: Any, **more: Any) -> None:
        original(config, plan, wrap=lambda spec: Faulty(spec, pause), **more)

    server.serve = serve  # type: ignore[assignment]
    run_command()
