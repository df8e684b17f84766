"""Parses the JSON form of a tool call incrementally: where its arguments begin and where they end."""

import json
import re
from dataclasses import dataclass

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[^,}\]\s]*")


class Incomplete:
    """More text is needed to decide."""


class Malformed:
    """Not a call, whatever follows."""


@dataclass(frozen=True)
class Head:
    name: str
    stop: int  # characters read
    arguments: str | None  # None: they begin at `stop`


def call_head(text: str) -> Head | Incomplete | Malformed:
    """Parses a call up to its arguments, or all of it if they come before the name. `text` begins with {."""
    place, name, arguments = 1, None, None
    while True:
        place = _after_space(text, place)
        if place < len(text) and text[place] == ",":
            place = _after_space(text, place + 1)
        if place == len(text):
            return Incomplete()
        if text[place] == "}":
            return Head(name, place + 1, arguments or "{}") if name else Malformed()
        key = _STRING.match(text, place)
        if key is None:
            return Incomplete() if text[place] == '"' else Malformed()
        place = _after_space(text, key.end())
        if place == len(text):
            return Incomplete()
        if text[place] != ":":
            return Malformed()
        place = _after_space(text, place + 1)
        if place == len(text):
            return Incomplete()
        member = key.group()[1:-1]
        wanted = member in ("arguments", "parameters")
        if wanted and name and text[place] == "{":
            return Head(name, place, None)
        stop = _value_end(text, place)
        if stop is None:
            return Incomplete()
        try:
            value = json.loads(text[place:stop])
        except (ValueError, RecursionError):
            return Malformed()
        if member == "name":
            if not isinstance(value, str) or not value:
                return Malformed()
            name = value
        elif wanted:
            arguments = value if isinstance(value, str) else text[place:stop]  # some models write JSON in a string
        place = stop


def _value_end(text: str, place: int) -> int | None:
    """Where the value at `place` ends, valid or not; None if it may continue."""
    if text[place] in "{[":
        length = ObjectEnd().find(text[place:])
        return None if length is None else place + length
    found = (_STRING if text[place] == '"' else _SCALAR).match(text, place)
    return found.end() if found and (text[place] == '"' or found.end() < len(text)) else None


def _after_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found else place


class ObjectEnd:
    """Finds the closing brace of an object whose text arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._inside = False  # inside a string
        self._escaped = False

    def find(self, text: str) -> int | None:
        """Where the object ends in this piece, or None. A tag outside strings ends it too."""
        for place, letter in enumerate(text):
            if self._inside:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._inside = False
            elif letter == '"':
                self._inside = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    return place + 1
            elif letter == "<":
                return place
        return None
