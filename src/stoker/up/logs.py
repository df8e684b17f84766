"""What engines print: kept in files of limited size without secrets, and shown without what a terminal would obey."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path

from stoker.errors import visible
from stoker.recipes.load import SECRET

LARGEST = 8 << 20  # bytes of a file; the one before it is kept beside it
LEAST_SECRET = 6  # characters: masking a value of one or two would blacken everything
OLDER = ".1"
# Colours and cursor movements, which would only be noise as visible escapes.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")


def masking(environment: Mapping[str, str]) -> re.Pattern[bytes] | None:
    """The values of an environment's secrets."""
    found = {value for name, value in environment.items() if SECRET.search(name) and len(value) >= LEAST_SECRET}
    if not found:
        return None
    return re.compile(b"|".join(re.escape(value.encode()) for value in sorted(found, key=len, reverse=True)))


class Log:
    """A file that begins anew when it is full."""

    def __init__(self, path: Path, secrets: re.Pattern[bytes] | None = None, largest: int = LARGEST) -> None:
        self.path = path
        self._secrets, self._largest = secrets, largest
        self._file = self._open()

    def write(self, text: bytes) -> None:
        """Whole lines, so that no secret is cut in two. A full disk costs the lines, not the engine they come from."""
        if self._secrets:
            text = self._secrets.sub(b"***", text)
        with suppress(OSError):
            if self._file.tell() + len(text) > self._largest:
                self._file.close()
                self.path.replace(older(self.path))
                self._file = self._open()
            self._file.write(text)

    def close(self) -> None:
        self._file.close()

    def _open(self) -> FileIO:
        return FileIO(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a")


def older(path: Path) -> Path:
    return path.with_name(path.name + OLDER)


def last_lines(path: Path, count: int) -> list[str]:
    """As they may be shown."""
    found: list[str] = []
    for part in (path, older(path)):
        if len(found) < count and part.exists():
            found = list(shown(part.read_bytes()))[-(count - len(found)) :] + found
    return found


class Follow:
    """What is written to a log after now, through its new beginnings."""

    def __init__(self, path: Path, from_start: bool = False) -> None:
        self._path, self._text = path, b""
        self._file = path.open("rb")
        self._file.seek(0, os.SEEK_SET if from_start else os.SEEK_END)

    def lines(self) -> Iterator[str]:
        """The whole lines that are new since the last call."""
        text = self._text + self._file.read()
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino:
                text += self._file.read()
                self._file.close()
                self._file = self._path.open("rb")
                text += self._file.read()
        whole, newline, self._text = text.rpartition(b"\n")
        yield from shown(whole + newline)


def shown(text: bytes) -> Iterator[str]:
    """Lines for a terminal. Of a progress bar, the last state."""
    for line in text.decode("utf-8", "replace").split("\n"):
        states = [state for state in line.split("\r") if state]
        if states:
            yield visible(_CONTROL.sub("", states[-1]), keep="\t")
