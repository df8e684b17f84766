"""What commands say on stderr, for people: the bar while they move bytes (phase, share, amount, speed, time left), and
errors."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def error_console() -> "Console":
    from rich.console import Console

    return Console(stderr=True, highlight=False)


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
