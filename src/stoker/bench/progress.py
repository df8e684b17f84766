"""Progress bars for the suite and the current round, with the latest speed. Only drawn on a terminal."""

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from stoker.bench.record import Request
from stoker.bench.run import Watcher
from stoker.bench.suites import Cell


class Bars(Watcher):
    """Use as a context manager."""

    def __init__(self, console: Console, cells: Sequence[Cell], servers: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self._console, self._several = console, servers > 1
        self._bar = Progress(*columns, *times, console=console, transient=True, disable=not console.is_terminal)
        self._all = self._bar.add_task("rounds", total=sum((cell.rounds + 1) * servers for cell in cells))
        self._one = self._bar.add_task("requests", total=None)
        self._done = self._failed = 0
        self._speed = ""

    def __enter__(self) -> "Bars":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def round_started(self, cell: Cell, server: str, number: int) -> None:
        what = f"run {number} of {cell.rounds}" if number else "warm-up"
        known = cell.seconds is None and not cell.histories and cell.depth is None
        self._done = self._failed = 0
        self._bar.update(self._all, description=f"{cell.title}{self._on(server)}, {what}{self._speed}")
        self._bar.reset(self._one, total=cell.concurrency * cell.each if known else None, description="requests")

    def _on(self, server: str) -> str:
        return f" on {server}" if self._several else ""

    def fitting_prompts(self) -> None:
        self._bar.update(self._one, description="fitting prompts")

    def request_done(self, ok: bool) -> None:
        self._done, self._failed = self._done + 1, self._failed + (not ok)
        failed = f", {self._failed} failed" if self._failed else ""
        self._bar.update(self._one, completed=self._done, description=f"requests{failed}")

    def round_done(self, cell: Cell, server: str, number: int, requests: Sequence[Request]) -> None:
        self._bar.advance(self._all)
        speeds = [request.decode_tokens_per_s for request in requests if request.decode_tokens_per_s]
        self._speed = f" · last {sum(speeds) / len(speeds):.1f} tok/s" if speeds else ""
        failed = [request.failure for request in requests if request.failure]
        if failed:
            first = f"{failed[0].kind}, {failed[0].message}"
            message = f"{cell.title} on {server}: {len(failed)} of {len(requests)} failed: {first}"
            self._console.print(message[:400], style="red", markup=False)
