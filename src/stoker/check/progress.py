"""How far a check is, in output tokens, and the time that is left: a bar on a terminal, elsewhere a line per tenth."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from stoker.check.items import Item
from stoker.check.record import Asked
from stoker.check.run import Watcher


class Bar(Watcher):
    """Use as a context manager."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._console = console
        self._bar = Progress(
            *columns,
            *times,
            console=console,
            transient=True,
            disable=not console.is_terminal,
            speed_estimate_period=300,
        )
        self._task = self._bar.add_task("asking", total=None)
        self._done = self._failed = 0
        self._tokens = self._kept = self._asked = 0
        self._began = time.monotonic()

    def __enter__(self) -> "Bar":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def started(self, tokens: int, done: int) -> None:
        self._bar.update(self._task, total=tokens, completed=done)
        self._tokens, self._kept, self._began = tokens, done, time.monotonic()

    def item_done(self, item: Item, asked: Asked) -> None:
        failed = [judged for judged in asked.replies.values() if judged.score is None]
        self._done, self._failed = self._done + 1, self._failed + bool(failed)
        told = f", {self._failed} failed" if self._failed else ""
        self._bar.update(self._task, advance=item.cost, description=f"{self._done} items{told}, {item.suite}")
        self._tell(item.cost)
        if failed and self._failed <= 3:
            self._console.print(f"{item.id} failed: {failed[0].why}", style="red", markup=False)

    def _tell(self, tokens: int) -> None:
        """A line whenever another tenth is done, where no bar can be drawn."""
        before = self._kept + self._asked
        self._asked += tokens
        done = before + tokens
        if self._console.is_terminal or 10 * before // self._tokens == 10 * done // self._tokens:
            return
        left = (time.monotonic() - self._began) * (self._tokens - done) / self._asked
        told = f", {self._failed} failed" if self._failed else ""
        self._console.print(f"{done / self._tokens:.0%}: {self._done} items{told}; about {duration(left)} left")

    def phase(self, name: str, total: int) -> None:
        self._bar.reset(self._task, total=total, description=name)

    def step(self) -> None:
        self._bar.advance(self._task)


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
