"""How commands speak to people: on stdout, on stderr, the bar while they move bytes (phase, share, amount, speed, time
left), and errors. rich is imported where something is printed, so that --json need not wait for it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def output_console() -> "Console":
    return _console(stderr=False)


def error_console() -> "Console":
    return _console(stderr=True)


def _console(stderr: bool) -> "Console":
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, emoji=False)  # a table of emoji takes long to load, and :100: stays


def say_error(error: Exception) -> None:
    """One sentence, in red where there are colours."""
    from rich.markup import escape

    error_console().print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)


def byte_progress(console: "Console") -> "Progress":
    """Nothing is drawn where stderr is no terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
