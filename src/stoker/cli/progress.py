"""Terminal output of commands: consoles for stdout and stderr, progress bars for bytes, and errors.

rich is imported where something is printed, so that --json does not wait for its import.
"""

import codecs
import io
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from stoker.engine.worker.messages import Loading


def output_console() -> "Console":
    return _console(stderr=False)


def error_console() -> "Console":
    return _console(stderr=True)


def _console(stderr: bool) -> "Console":
    from rich.console import Console

    return Console(
        stderr=stderr, highlight=False, emoji=False
    )  # loading the table of emoji is slow, and text such as :100: must stay


def say_error(error: Exception) -> None:
    """Prints an error as one sentence, in red if the terminal has colours."""
    from rich.markup import escape

    error_console().print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)


def check_writable(*files: Path | None) -> None:
    """Raises if a result file could not be written later. Called before the work begins; `-` is stdout."""
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


def write_result(file: Path, text: str) -> None:
    """Writes a result file. What `check_writable` cannot foresee, such as a full disk, is a sentence too."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{file} cannot be written: {error.strerror or error}.") from error


def replace_unencodable() -> None:
    """Writes characters that stdout and stderr cannot encode as similar ones that they can, instead of failing."""
    codecs.register_error("similar", _similar)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="similar")


# One character for one, so that columns stay in line.
SIMILAR = str.maketrans("≈·–—−×→←≤≥✓✗…±µ█░■●•“”‘’│─", "~.---x><<>+x.~u#.#**\"\"''|-")


def _similar(error: UnicodeError) -> tuple[str, int]:
    """Accents are dropped; what resembles nothing becomes a question mark."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].translate(SIMILAR)
    plain = (unicodedata.normalize("NFKD", character)[0] for character in text)
    return "".join(character if character.isascii() else "?" for character in plain), error.end


def byte_progress(console: "Console") -> "Progress":
    """A progress bar for bytes. It draws nothing if stderr is not a terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def phase_progress(console: "Console") -> "Iterator[Callable[[Loading], None]]":
    """A progress bar of an engine that is being built: call what it gives with each phase as it goes on."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"))
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("starting", total=None, amount="")
        phase = ""

        def show(loading: "Loading") -> None:
            nonlocal phase
            if phase != loading.phase:
                phase = loading.phase
                bar.reset(task, total=None)
            bar.update(
                task,
                description=phase,
                completed=loading.done,
                total=loading.total or None,
                amount=loading.amount,
            )

        yield show
