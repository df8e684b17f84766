"""Values of a tool call's parameters: plain text in the model's format, JSON in the API's.

What type a parameter has is read off the tool's schema, as far as it says so plainly. Nothing of a schema is executed
or fetched: references are followed within it only.
"""

import json
from collections.abc import Mapping
from typing import Any

STRING = frozenset({"string"})
_NAMES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}
_KNOWN = frozenset(_NAMES.values())
_PYTHONIC = {"True": True, "False": False, "None": None}
_DEEPEST = 16  # references and alternatives followed one inside another


def parameter_types(schema: Any, name: str) -> frozenset[str]:
    """JSON types that parameter `name` of a tool may have; empty where the schema does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or name not in properties:
        return frozenset()
    return _types(properties[name], schema, _DEEPEST)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named} & _KNOWN)
    if isinstance(named, list):
        return frozenset(entry for entry in named if isinstance(entry, str) and entry in _KNOWN)
    if isinstance(schema.get("enum"), list):
        return frozenset(_NAMES.get(type(entry), "string") for entry in schema["enum"])
    if "const" in schema:
        return frozenset({_NAMES.get(type(schema["const"]), "string")})
    if isinstance(schema.get("$ref"), str):
        return _types(_within(root, schema["$ref"]), root, depth - 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            return frozenset().union(*(_types(entry, root, depth - 1) for entry in schema[key]))
    return frozenset()


def _within(root: Any, reference: str) -> Any:
    """What `#/a/b` points to; None for anything outside the schema."""
    if not reference.startswith("#/"):
        return None
    for step in reference[2:].split("/"):
        if not isinstance(root, Mapping) or step not in root:
            return None
        root = root[step]
    return root


def to_json(text: str, types: frozenset[str]) -> str:
    """A value as JSON text. What does not parse as one of its types stays a string, so that the result is valid."""
    if not types or types == STRING:
        return json.dumps(text, ensure_ascii=False)
    stripped = text.strip()
    try:
        value: Any = _PYTHONIC[stripped] if stripped in _PYTHONIC else json.loads(stripped)
        if isinstance(value, float) and value.is_integer() and "number" not in types and "integer" in types:
            value = int(value)
        encoded = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _NAMES[type(value)]
    fits = kind in types or (kind == "integer" and "number" in types)
    return json.dumps(text, ensure_ascii=False) if not fits and "string" in types else encoded


def escape(text: str) -> str:
    """Text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
