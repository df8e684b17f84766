"""Engines that go wrong on purpose, for the tests of the engine process, which builds them from these."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoker.engine.event import Event
from stoker.engine.worker.messages import Loading
from stoker.engine.worker.spec import Buildable, Built
from stoker.sampling.mask import TokenMask

FATAL = 13


@dataclass(frozen=True)
class Slow:
    """Every step takes at least `pause` seconds, so that something can happen while a request runs."""

    spec: Buildable
    pause: float

    def build(self, report: Callable[[Loading], None]) -> Built:
        built = self.spec.build(report)
        step = built.engine.step

        def slow_step() -> list[Event]:
            time.sleep(self.pause)
            return step()

        built.engine.step = slow_step  # type: ignore[method-assign]
        return built


@dataclass(frozen=True)
class Fragile:
    """A step raises once there is a prompt that begins with FATAL."""

    spec: Buildable

    def build(self, report: Callable[[Loading], None]) -> Built:
        built = self.spec.build(report)
        engine, submit, step = built.engine, built.engine.submit, built.engine.step
        fatal = False

        def fragile_submit(prompt: Sequence[int], *arguments: Any) -> int:
            nonlocal fatal
            fatal = fatal or prompt[0] == FATAL
            return submit(prompt, *arguments)

        def fragile_step() -> list[Event]:
            if fatal:
                raise ZeroDivisionError("a planted fault")
            return step()

        engine.submit, engine.step = fragile_submit, fragile_step  # type: ignore[assignment, method-assign]
        return built


@dataclass(frozen=True)
class Unbuildable:
    def build(self, report: Callable[[Loading], None]) -> Built:
        raise ZeroDivisionError("a planted fault")


@dataclass(frozen=True)
class NeverReady:
    def build(self, report: Callable[[Loading], None]) -> Built:
        report(Loading("weights", 1, 4))
        time.sleep(600)
        raise AssertionError("it should have been killed long ago")


@dataclass(frozen=True)
class Only:
    """Makes a mask that allows some tokens, and raises `error` once `breaks_after` are out."""

    tokens: tuple[int, ...]
    breaks_after: int | None = None
    error: type[BaseException] = ZeroDivisionError

    def __call__(self) -> TokenMask:
        return OnlyMask(self)


class OnlyMask:
    def __init__(self, only: Only) -> None:
        self._only = only
        self._allowed = torch.zeros(512, dtype=torch.bool)
        self._allowed[list(only.tokens)] = True

    def allowed(self, output: Sequence[int]) -> Tensor:
        if len(output) == self._only.breaks_after:
            raise self._only.error("a planted fault")
        return self._allowed

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        return ()


@dataclass(frozen=True)
class Broken:
    def __call__(self) -> TokenMask:
        raise ZeroDivisionError("a planted fault")


class Unreadable(int):
    """A token id that can be sent and cannot be read."""

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _fail, ()


def _fail() -> object:
    raise ZeroDivisionError("a planted fault")
