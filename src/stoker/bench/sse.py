"""Server-sent events out of timed bytes. An event has the time of the byte that completed it."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

DONE = "[DONE]"


def events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """(arrival, data) of each event; comments and other fields are dropped, several data lines are joined."""
    rest = b""
    data: list[str] = []
    last = 0.0
    for at, piece in pieces:
        last = at
        *lines, rest = (rest + piece).split(b"\n")
        for raw in lines:
            line = raw.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
            elif not line and data:
                yield at, "\n".join(data)
                data = []
    if rest.startswith(b"data:"):
        data.append(rest[5:].strip().decode("utf-8", "replace"))
    if data:  # a stream that ends without the empty line
        yield last, "\n".join(data)


def parsed(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any] | None]]:
    """None stands for [DONE]. Raises ValueError where an event is not a JSON object."""
    for at, data in events(pieces):
        if data.strip() == DONE:
            yield at, None
            continue
        found = json.loads(data)
        if not isinstance(found, dict):
            raise ValueError(f"an event that is no JSON object: {data[:80]}")
        yield at, found
