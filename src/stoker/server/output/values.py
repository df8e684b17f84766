"""Converts the values of a tool call's parameters from plain text, as the model writes them, to JSON."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from stoker.server.output.tool_schemas import kind_of

STRING = frozenset({"string"})
SPACE = " \t\r\n"
_PYTHONIC = {"True": "true", "False": "false", "None": "null"}
# an unclosed string reaches to the end, so that no match begins inside it
_PYTHON_TOKEN = re.compile(
    r"""'(?:[^'\\]|\\.)*(?:'|\\?\Z)|"(?:[^"\\]|\\.)*(?:"|\\?\Z)|\b(?:True|False|None)\b""", re.DOTALL
)


def to_json(text: str, types: frozenset[str]) -> str:
    """A value as JSON text. One that does not parse as any of its types becomes a string, so the result is valid."""
    if not types or types == STRING:
        return json.dumps(text, ensure_ascii=False)
    stripped = text.strip(SPACE)
    for form in _forms(stripped, "string" in types):
        kind, encoded = _read(form, types)
        if kind in types:
            return encoded
    kind, encoded = _read(stripped, types)
    return json.dumps(text, ensure_ascii=False) if kind is None or "string" in types else encoded


def _forms(text: str, may_be_text: bool) -> Iterator[str]:
    """Candidates for a value's JSON, likeliest first: models also write Python's constants and strings, and JSON inside
    a JSON string."""
    yield _PYTHONIC.get(text, text)
    if not may_be_text:
        yield _PYTHONIC.get(text.capitalize(), text)
        yield _PYTHON_TOKEN.sub(_as_json, text)
        with suppress(ValueError, RecursionError):
            inner = json.loads(text)
            if isinstance(inner, str):
                yield _PYTHON_TOKEN.sub(_as_json, inner)


def _read(text: str, types: frozenset[str]) -> tuple[str | None, str]:
    """The type of a JSON text and the text to emit; None if it is not JSON."""
    try:
        # numbers are not parsed, since they are kept as written, however large
        kind = kind_of(json.loads(text, parse_int=_zero, parse_float=_half, parse_constant=_refuse))
        if kind == "number" and "number" not in types and "integer" in types and float(text).is_integer():
            return "integer", str(int(float(text)))
    except (ValueError, OverflowError, RecursionError):
        return None, text
    return kind, text


def _as_json(found: re.Match[str]) -> str:
    """A Python constant or string literal as JSON."""
    word = found.group()
    if not word.startswith("'"):
        return _PYTHONIC.get(word, word)
    inner = re.sub(r"""\\.|\"""", lambda part: {"\\'": "'", '"': '\\"'}.get(part.group(), part.group()), word[1:-1])
    return f'"{inner}"'


def escape(text: str) -> str:
    """Text escaped for use between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _zero(_: str) -> int:
    return 0


def _half(_: str) -> float:
    return 0.5


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
