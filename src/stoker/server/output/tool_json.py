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
    position, name, arguments = 1, None, None
    while True:
        position = _after_space(text, position)
        if position < len(text) and text[position] == ",":
            position = _after_space(text, position + 1)
        if position == len(text):
            return Incomplete()
        if text[position] == "}":
            return Head(name, position + 1, arguments or "{}") if name else Malformed()
        key = _STRING.match(text, position)
        if key is None:
            return Incomplete() if text[position] == '"' else Malformed()
        position = _after_space(text, key.end())
        if position == len(text):
            return Incomplete()
        if text[position] != ":":
            return Malformed()
        position = _after_space(text, position + 1)
        if position == len(text):
            return Incomplete()
        member = key.group()[1:-1]
        wanted = member in ("arguments", "parameters")
        if wanted and name and text[position] == "{":
            return Head(name, position, None)
        stop = _value_end(text, position)
        if stop is None:
            return Incomplete()
        try:
            value = json.loads(text[position:stop])
        except (ValueError, RecursionError):
            return Malformed()
        if member == "name":
            if not isinstance(value, str) or not value:
                return Malformed()
            name = value
        elif wanted:
            arguments = value if isinstance(value, str) else text[position:stop]  # some models write JSON in a string
        position = stop


def _value_end(text: str, position: int) -> int | None:
    """Where the value at `position` ends, valid or not; None if it may continue."""
    if text[position] in "{[":
        length = ObjectEnd().find(text[position:])
        return None if length is None else position + length
    found = (_STRING if text[position] == '"' else _SCALAR).match(text, position)
    return found.end() if found and (text[position] == '"' or found.end() < len(text)) else None


def _after_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


class ObjectEnd:
    """Finds the closing brace of an object whose text arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._inside = False  # inside a string
        self._escaped = False

    def find(self, text: str) -> int | None:
        """Where the object ends in this piece, or None. A tag outside strings ends it too."""
        for position, letter in enumerate(text):
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
                    return position + 1
            elif letter == "<":
                return position
        return None
