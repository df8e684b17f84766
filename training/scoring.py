"""What counts as right: calls read back from text, JSON compared by value, compressors' bits per byte."""

import gzip
import json
import lzma
import re
from typing import Any

CALL = re.compile(r"<tool_call>\n<function=([^>\n]+)>\n(.*?)</function>\n</tool_call>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n", re.DOTALL)

Call = tuple[str, dict[str, Any]]


def calls_in(text: str, tools: list[dict[str, Any]]) -> list[Call]:
    """Calls with arguments in the types of their schema; an argument that does not fit stays text and so is wrong."""
    schemas = {t["function"]["name"]: t["function"]["parameters"].get("properties", {}) for t in tools}
    found = []
    for name, body in CALL.findall(text):
        properties = schemas.get(name, {})
        arguments = {key: _typed(value, properties.get(key, {})) for key, value in PARAMETER.findall(body)}
        found.append((name, arguments))
    return found


def _typed(value: str, schema: dict[str, Any]) -> Any:
    if schema.get("type") == "string":
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def expected_calls(message: dict[str, Any]) -> list[Call]:
    return [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]


def same_calls(found: list[Call], expected: list[Call]) -> bool:
    """Same tools in the same order, same arguments; 3 and 3.0 are the same number, true and 1 are not the same."""
    return len(found) == len(expected) and all(
        a[0] == b[0] and json.dumps(_plain(a[1]), sort_keys=True) == json.dumps(_plain(b[1]), sort_keys=True)
        for a, b in zip(found, expected, strict=True)
    )


def same_json(text: str, expected: str) -> tuple[bool, bool]:
    """Is `text` valid JSON, and does it say the same as `expected`?"""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return False, False
    return True, json.dumps(_plain(found), sort_keys=True) == json.dumps(_plain(json.loads(expected)), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def compressed_bits_per_byte(text: str) -> dict[str, float]:
    """What the usual compressors make of the same text, given all of it at once."""
    raw = text.encode()
    return {
        "gzip -9": 8 * len(gzip.compress(raw, 9, mtime=0)) / len(raw),
        "xz -9e": 8 * len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)) / len(raw),
    }
