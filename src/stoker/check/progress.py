"""A progress bar in output tokens, with the time that is left. Only drawn on a terminal."""

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

    def __enter__(self) -> "Bar":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def started(self, tokens: int, done: int) -> None:
        self._bar.update(self._task, total=tokens, completed=done)

    def item_done(self, item: Item, asked: Asked) -> None:
        failed = [judged for judged in asked.replies.values() if judged.score is None]
        self._done, self._failed = self._done + 1, self._failed + bool(failed)
        told = f", {self._failed} failed" if self._failed else ""
        self._bar.update(self._task, advance=item.cost, description=f"{self._done} items{told}, {item.suite}")
        if failed and self._failed <= 3:
            self._console.print(f"{item.id} failed: {failed[0].why}", style="red", markup=False)

    def phase(self, name: str, total: int) -> None:
        self._bar.reset(self._task, total=total, description=name)

    def step(self) -> None:
        self._bar.advance(self._task)
