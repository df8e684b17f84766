"""Values of a tool call's parameters: plain text in the model's format, JSON in the API's."""

import json
from typing import Any

from stoker.server.parse.schemas import kind_of

STRING = frozenset({"string"})
SPACE = " \t\r\n"
_PYTHONIC = {"True": "true", "False": "false", "None": "null"}


def to_json(text: str, types: frozenset[str]) -> str:
    """A value as JSON text. What does not parse as one of its types stays a string, so that the result is valid."""
    if not types or types == STRING:
        return json.dumps(text, ensure_ascii=False)
    stripped = text.strip(SPACE)
    encoded = _PYTHONIC.get(stripped, stripped)
    try:
        # numbers stay as they are written, however large: their values are not needed
        kind = kind_of(json.loads(encoded, parse_int=_zero, parse_float=_half, parse_constant=_refuse))
        if kind == "number" and "number" not in types and "integer" in types and float(encoded).is_integer():
            kind, encoded = "integer", str(int(float(encoded)))
    except (ValueError, OverflowError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False) if kind not in types and "string" in types else encoded


def escape(text: str) -> str:
    """Text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _zero(_: str) -> int:
    return 0


def _half(_: str) -> float:
    return 0.5


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
