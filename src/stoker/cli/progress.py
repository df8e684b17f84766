"""How commands speak to people: on stdout, on stderr, the bar while they move bytes (phase, share, amount, speed, time
left), and errors. rich is imported where something is printed, so that --json need not wait for it."""

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import RequestError

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


def check_writable(*files: Path | None) -> None:
    """Before the work: raises for a file that could not be written after it. `-` is stdout."""
    for file in files:
        if file is None or str(file) == "-":
            continue
        folder = file.absolute().parent
        if not folder.is_dir():
            raise RequestError(f"{file} cannot be written: there is no directory {folder}. Make it first.")
        if file.is_dir():
            raise RequestError(f"{file} cannot be written: it is a directory. Name a file in it.")
        if not os.access(file if file.exists() else folder, os.W_OK):
            raise RequestError(f"{file} cannot be written: this user may not write there.")


def any_text() -> None:
    """On terminals and pipes that hold ASCII alone, other characters become question marks, not tracebacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")


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
