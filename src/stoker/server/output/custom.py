"""Custom tools take plain text. They are offered as functions with one string, so the text of a call of one is taken
out of the JSON arguments again."""

import json
import re
from collections.abc import Collection, Iterable

from stoker.server.output.pieces import CallArguments, CallStart, Piece

CUSTOM_INPUT = "input"  # the one parameter
_START = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_HIGH = "u[dD][89abAB][0-9a-fA-F]{2}"  # the first half of a surrogate pair: only the pair is a character
_WHOLE = re.compile(rf'(?:[^"\\]|\\(?:{_HIGH}\\u[0-9a-fA-F]{{4}}|(?!{_HIGH})u[0-9a-fA-F]{{4}}|[^u]))*')


class CustomInput:
    """Arguments come in pieces and leave as text. `finish` gives what is left, so that all of it is `text`."""

    def __init__(self) -> None:
        self.text = ""
        self._arguments = ""
        self._held: str | None = None  # None: the text has not begun

    def push(self, piece: str) -> str:
        self._arguments += piece
        if self._held is None:
            start = _START.match(self._arguments)
            if not start:
                return ""
            self._held = self._arguments[start.end() :]
        else:
            self._held += piece
        whole = _WHOLE.match(self._held)
        assert whole is not None  # it matches the empty text
        self._held = self._held[whole.end() :]
        return self._add(json.loads(f'"{whole.group()}"', strict=False))

    def finish(self) -> str:
        """Arguments of another form are given as they are."""
        try:
            found = json.loads(self._arguments)[CUSTOM_INPUT]
        except (ValueError, RecursionError, KeyError, TypeError):
            found = self._arguments if self._held is None else self.text  # the latter: a call that was cut off
        if isinstance(found, str) and found.startswith(self.text):
            return self._add(found[len(self.text) :])
        return ""

    def _add(self, text: str) -> str:
        self.text += text
        return text


class CustomCalls:
    """Pieces of one answer, in which the arguments of calls of these tools become the text they are called with."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._index = 0
        self._input: CustomInput | None = None  # of the call under way, if it is one of a custom tool

    def push(self, pieces: list[Piece], ended: bool) -> list[Piece]:
        return list(self._pushed(pieces, ended)) if self._names else pieces

    def _pushed(self, pieces: list[Piece], ended: bool) -> Iterable[Piece]:
        for piece in pieces:
            if isinstance(piece, CallArguments):
                text = piece.text if self._input is None else self._input.push(piece.text)
                if text:
                    yield CallArguments(piece.index, text)
                continue
            yield from self._end()
            yield piece
            if isinstance(piece, CallStart) and piece.name in self._names:
                self._index, self._input = piece.index, CustomInput()
        if ended:
            yield from self._end()

    def _end(self) -> Iterable[Piece]:
        rest = self._input.finish() if self._input else ""
        self._input = None
        if rest:
            yield CallArguments(self._index, rest)
