"""Custom tools, which take plain text. The model sees them as functions with one string parameter, so the text of a
call is extracted from its JSON arguments."""

import json
import re
from collections.abc import Collection, Iterable

from stoker.server.output.pieces import CallArguments, CallStart, Piece

CUSTOM_INPUT = "input"  # the one parameter
_START = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_HIGH = "u[dD][89abAB][0-9a-fA-F]{2}"  # a high surrogate: only with the low one it is a character
_WHOLE = re.compile(rf'(?:[^"\\]|\\(?:{_HIGH}\\u[0-9a-fA-F]{{4}}|(?!{_HIGH})u[0-9a-fA-F]{{4}}|[^u]))*')


class CustomInput:
    """Extracts the text of a call from JSON arguments that arrive in pieces. `text` is what has come out so far."""

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
        """The rest of the text. Arguments of another form are passed on unchanged."""
        try:
            found = json.loads(self._arguments)[CUSTOM_INPUT]
        except (ValueError, RecursionError, KeyError, TypeError):
            found = self._arguments if self._held is None else self.text  # the latter if the call was cut off
        if isinstance(found, str) and found.startswith(self.text):
            return self._add(found[len(self.text) :])
        return ""

    def _add(self, text: str) -> str:
        self.text += text
        return text


class CustomCalls:
    """Replaces the arguments of custom tools' calls by their text in the pieces of one answer."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._index = 0
        self._input: CustomInput | None = None  # of the current call, if it calls a custom tool

    def push(self, pieces: Iterable[Piece]) -> list[Piece]:
        return list(self._pushed(pieces))

    def finish(self) -> list[Piece]:
        """The rest of a call that the answer ends with."""
        return list(self._end())

    def _pushed(self, pieces: Iterable[Piece]) -> Iterable[Piece]:
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

    def _end(self) -> Iterable[Piece]:
        rest = self._input.finish() if self._input else ""
        self._input = None
        if rest:
            yield CallArguments(self._index, rest)
