"""Reads the small files of a checkpoint directory, however hostile: no hang, no crash, no flood of memory. No torch."""

import json
import os
import stat
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from stoker.errors import ConfigError

MAX_JSON = 100_000_000  # bytes; the largest index of a published model has a few million
MAX_DEPTH = 64  # of lists and objects in each other; published files have six
KINDS = {
    stat.S_ISDIR: "a directory", stat.S_ISFIFO: "a named pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}  # fmt: skip


class NotAFile(OSError):
    """Not a regular file of a reasonable size: reading it could hang or never end."""

    strerror: str


def open_file(path: Path) -> FileIO:
    """A regular file, opened for reading without a buffer; anything else is an OSError that says what it is."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for is_kind, name in KINDS.items() if is_kind(mode)), "no regular file")
            raise NotAFile(0, f"it is {kind}, expected a file", str(path))
        return os.fdopen(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def read_small(path: Path, limit: int = MAX_JSON) -> bytes:
    """All of a regular file, if it is no larger than `limit`; else an OSError."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise NotAFile(0, f"it has {size:,} bytes, and at most {limit:,} are read", str(path))
        return file.read(size) or b""


def parse_json(text: bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parses JSON; a ValueError with a short reason for what is not JSON, or is nested deeper than any checkpoint's."""
    try:
        raw = json.loads(text.decode("utf-8"), object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except ValueError:  # Python's limit on digits
        raise ValueError("it holds a number of more than 4,000 digits") from None
    level, depth = [raw], 0
    while level := [part for outer in level if isinstance(outer, dict | list) for part in _inside(outer)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep")
    return raw


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; a ConfigError says what is wrong with the file."""
    try:
        raw = parse_json(read_small(path))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path} does not exist; a model directory holds config.json and *.safetensors.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); fetch the file again.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a JSON {type(raw).__name__}, expected an object.")
    return raw


def _inside(outer: dict[str, Any] | list[Any]) -> Any:
    return outer.values() if isinstance(outer, dict) else outer
