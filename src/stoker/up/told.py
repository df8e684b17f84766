"""How `stoker up` tells what it does; the command draws it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from stoker.bench.run import Watcher
from stoker.bench.suites import Cell


class Told(Protocol):
    """Hears how it goes on."""

    def stage(self, name: str) -> None:
        """A stage begins."""

    def doing(self, text: str, done: float = 0, total: float = 0) -> None:
        """What happens within a stage; how far it is where there is a total."""

    def say(self, text: str) -> None:
        """A line that should stay."""

    def done(self, text: str) -> None:
        """The stage is over."""

    def measuring(self, chosen: Sequence[Cell]) -> AbstractContextManager[Watcher]:
        """Shows how a measurement goes on."""
