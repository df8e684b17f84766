"""JSON schemas of tools: normalises type names, resolves references and finds the types of a parameter.

Nothing in a schema is executed or fetched: references are resolved within it only, and its regular expressions are
never run here.
"""

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

ALL = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
# type names that tools use and JSON schema does not have, by prefix
ALIASES = {
    "str": "string",
    "text": "string",
    "varchar": "string",
    "char": "string",
    "int": "integer",
    "uint": "integer",
    "long": "integer",
    "short": "integer",
    "unsigned": "integer",
    "num": "number",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "arr": "array",
    "tuple": "array",
    "none": "null",
}
# formats of the JSON schema specification; others are annotations
FORMATS = frozenset(
    [
        "date-time",
        "time",
        "date",
        "duration",
        "email",
        "idn-email",
        "hostname",
        "idn-hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uri-reference",
        "iri",
        "iri-reference",
        "uuid",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "regex",
    ]
)
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_NAMES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}


def kind_of(value: Any) -> str:
    return _NAMES[type(value)]


def mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """`schema` with `change` applied to it and to every schema inside it."""
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for key in _BY_NAME:
        if isinstance(found.get(key), Mapping):
            found[key] = {name: mapped(entry, change) for name, entry in found[key].items()}
    for key in (*_LISTS, *_SINGLE):
        if isinstance(found.get(key), list):
            found[key] = [mapped(entry, change) for entry in found[key]]
        elif key in found:
            found[key] = mapped(found[key], change)
    return change(found)


def standard(schema: Any) -> Any:
    """The schema with standard type names and formats, and a type wherever `properties` or `items` imply one."""
    return mapped(schema, _standard)


def _standard(schema: dict[str, Any]) -> dict[str, Any]:
    named = schema.get("type")
    if isinstance(named, str | list):
        schema["type"] = _type_name(named) if isinstance(named, str) else [_type_name(entry) for entry in named]
        if schema["type"] == "any":
            del schema["type"]
    if schema.get("format") not in (None, *FORMATS):
        del schema["format"]
    if not {"type", "enum", "const", "$ref", *_LISTS[:3]} & schema.keys():
        if {"properties", "additionalProperties", "patternProperties"} & schema.keys():
            schema["type"] = "object"
        elif {"items", "prefixItems"} & schema.keys():
            schema["type"] = "array"
    return schema


def _type_name(name: Any) -> Any:
    lower = name.strip().lower() if isinstance(name, str) else name
    if not isinstance(lower, str) or lower in ALL:
        return lower
    return next((kind for start, kind in ALIASES.items() if lower.startswith(start)), lower)


def target(root: Any, reference: Any) -> Any:
    """The value that a reference such as `#/a/b` points to; None if it is missing or outside the schema."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    for step in reference.split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and step.isdecimal() and int(step) < len(root):
            root = root[int(step)]
        elif isinstance(root, Mapping) and step in root:
            root = root[step]
        else:
            return None
    return root


def value_types(schema: Any, root: Any) -> frozenset[str]:
    """The JSON types that a value of this schema may have; all types if it does not say."""
    return _fold(schema, root, _own_types, {})


def parameter_types(root: Any, name: str) -> frozenset[str]:
    """The JSON types that a tool's parameter may have; empty if the schema does not say."""
    memo: dict[str, frozenset[str]] = {}

    def of_member(schema: Mapping[str, Any]) -> frozenset[str]:
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return _fold(properties[name], root, _own_types, memo)
        others = [schema.get("additionalProperties")]
        if isinstance(schema.get("patternProperties"), Mapping):
            others += schema["patternProperties"].values()
        said = [_fold(entry, root, _own_types, memo) for entry in others if isinstance(entry, Mapping)]
        return frozenset().union(*said) if said else ALL

    found = _fold(root, root, of_member, {})
    return frozenset() if found == ALL else found


def _fold(
    schema: Any, root: Any, own: Callable[[Mapping[str, Any]], frozenset[str]], memo: dict[str, frozenset[str]]
) -> frozenset[str]:
    """Combines what `own` returns for a schema and for its parts. Each reference is resolved once."""
    if not isinstance(schema, Mapping):
        return ALL
    found = own(schema)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in memo:
            memo[reference] = ALL  # for a reference to itself
            memo[reference] = _fold(target(root, reference), root, own, memo)
        found &= memo[reference]
    for key in _LISTS[:3]:
        if isinstance(schema.get(key), list) and schema[key]:
            parts = [_fold(entry, root, own, memo) for entry in schema[key]]
            found &= frozenset.intersection(*parts) if key == "allOf" else frozenset().union(*parts)
    return found


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    schema = _standard(dict(schema))
    found, named = ALL, schema.get("type")
    if isinstance(named, str | list):
        names = {named} if isinstance(named, str) else {entry for entry in named if isinstance(entry, str)}
        found &= _with_integers(names & ALL) or ALL
    if isinstance(schema.get("enum"), list):
        found &= _with_integers({kind_of(entry) for entry in schema["enum"]})
    if "const" in schema:
        found &= _with_integers({kind_of(schema["const"])})
    return found


def _with_integers(kinds: set[str]) -> frozenset[str]:
    return frozenset(kinds | {"integer"} if "number" in kinds else kinds)
