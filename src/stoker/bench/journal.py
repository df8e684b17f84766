"""Finished rounds of a benchmark or items of a check, written to disk at once, so that what is interrupted can resume.

A line of JSON each; the first says what is being measured, and another measurement does not continue it.
"""

import json
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from stoker.errors import BenchError

Entry = TypeVar("Entry", bound=msgspec.Struct)


class Round(msgspec.Struct, Generic[Entry]):
    """A line of the file after the first."""

    round: str
    requests: list[Entry]


class Journal(Generic[Entry]):
    """`entry` is what a round consists of, `what` the work that error messages name."""

    def __init__(
        self,
        path: Path | None,
        identity: dict[str, Any],
        entry: type[Entry],
        fresh: bool = False,
        what: str = "benchmark",
    ) -> None:
        self._path, self._entry, self._what = path, entry, what
        self._identity = json.loads(json.dumps(identity))  # as it will read back: tuples are lists
        self.rounds: dict[str, list[Entry]] = {}
        if path is None:
            return
        if path.exists() and not fresh:
            self._load(path)
        else:
            path.write_text(json.dumps({"identity": self._identity}) + "\n", encoding="utf-8")

    @property
    def requests(self) -> list[Entry]:
        return [request for requests in self.rounds.values() for request in requests]

    def add(self, key: str, requests: list[Entry]) -> None:
        self.rounds[key] = requests
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(Round(key, requests)) + b"\n")

    def finish(self) -> None:
        """Delete the journal: the result file now holds everything."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _load(self, path: Path) -> None:
        lines = path.read_bytes().split(b"\n")  # not at the line separators that an answer may contain
        try:
            identity = json.loads(lines[0])["identity"]
        except (KeyError, TypeError, ValueError) as error:
            raise BenchError(
                f"{path} is no unfinished {self._what}; remove it, or say --fresh to begin anew"
            ) from error
        if identity != self._identity:
            other = ", ".join(sorted(key for key in identity if identity[key] != self._identity.get(key)))
            raise BenchError(
                f"{path} is an unfinished {self._what} with another {other}; repeat its command, or say --fresh"
            )
        for line in lines[1:]:
            try:
                found = msgspec.json.decode(line, type=Round[self._entry])  # type: ignore[name-defined]
            except ValueError:  # cut by a kill while it was written, perhaps within a character
                continue
            self.rounds[found.round] = found.requests
