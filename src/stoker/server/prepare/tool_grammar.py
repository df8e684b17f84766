"""Tool calls as grammar rules, which enforce the whole schema of a tool in the XML and in the JSON form of a call.

In the XML form, strings are plain text and everything else is JSON. The parser distinguishes them by the types in the
schema, so for a parameter that may also be a number or null, text that reads as one is not allowed as a string. A
schema that cannot be enforced raises `Unenforceable`; nothing but annotations is ignored.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from stoker.server.output.tags import VALUE_ENDS
from stoker.server.output.tool_schemas import ALL, kind_of, mapped, parameter_types, target, value_types
from stoker.server.prepare.string_grammar import (
    ANY,
    ANY_RULE,
    TextRules,
    Unenforceable,
    literal,
    regex,
    whole_pattern,
)

# The most white space between two tokens of JSON: enough to indent, and too little for a model to get lost in it.
WHITE_SPACE = {"whitespace_flexible": True, "whitespace_pattern": "[ \\t\\n]{0,24}"}
# No white space where plain text is an alternative: the grammar library tells text from JSON by characters alone.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
# without the parser's bounds: this bars more, with a far smaller automaton
_ENDS = "|".join(VALUE_ENDS).replace("{0,64}", "*").replace("{1,64}", "+")
COMMON_RULES = [
    ANY_RULE,
    f"IN_VALUE: {ANY} & ~{regex(f'(?s:.*)(?:{_ENDS})(?s:.*)')}",
    "NEWLINE: /\\n/",
]
_SPACE = r"[ \t\r\n]*"
_NUMBER = r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_READ_AS = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": _NUMBER,
    "number": _NUMBER,
    "array": r"\[(?s:.*)",
    "object": r"\{(?s:.*)",
}
_ROOT_UNENFORCEABLE = (
    *("not", "if", "const", "enum", "dependentRequired", "dependentSchemas", "dependencies", "propertyNames"),
    *("unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
)
_MAX_SHAPES = 64
JsonRule = Callable[[Mapping[str, Any]], str]  # `%json` with limits on its size


def json_call(rule: str, name: str, schema: Any, json_rule: JsonRule) -> list[str]:
    """Rules for the text between the tags of a call in JSON."""
    arguments = {"type": "object"} if schema in (None, {}) else relocated(schema)
    call = {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    if _refers(schema):
        call["$defs"] = {"tool": relocated(schema)}
    return [f"{rule}: NEWLINE {rule}_json NEWLINE", f"{rule}_json: {json_rule({**call, 'x-guidance': WHITE_SPACE})}"]


def xml_call(rule: str, name: str, schema: Any, json_rule: JsonRule) -> list[str]:
    """Rules for the text between the tags of a call in XML: parameters in the order of the schema, optional ones at
    the model's choice."""
    root: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
    texts = TextRules(root, rule.upper())
    lines, bodies = [], []
    for number, shape in enumerate(_shapes(root, root, 0)):
        parts = []
        for index, key in enumerate(shape.names()):
            conditions = shape.conditions(key)
            if False in conditions:
                if key in shape.required:
                    raise Unenforceable(
                        f"required names {key[:100]!r}, which additionalProperties or properties forbid"
                    )
                continue
            if not key or re.search(r"[<>\n]", key) or key != key.strip():
                raise Unenforceable(f"the parameter {key[:100]!r} cannot be written in a call")
            part = f"{rule}_{number}_{index}"
            value = _value(part, conditions, parameter_types(root, key), root, texts, json_rule)
            head = literal(f"<parameter={key}>\n")
            lines += [f"{part}: {head} {value[0]}", *value[1:]]
            parts.append(part if key in shape.required else f"{part}?")
        free = f"{rule}_{number}_free"
        found = _free(free, shape, root, texts, json_rule)
        bodies.append(" ".join([*parts, f"{free}*"] if found else parts))
        lines += found
    head = regex(rf"[ \n]{{0,2}}<function={_escaped(name)}>\n")
    body = " | ".join(dict.fromkeys(bodies)) or '""'
    return [f"{rule}: {head} ({body}) {literal('</function>' + chr(10))}", *lines, *texts.lines]


def free_text(strict: Sequence[str], all_strict: bool) -> str:
    """A terminal for text that may follow an opening tag and is not a call of a strict tool."""
    names = "|".join(map(_escaped, strict))
    starts = r"[{<]" if all_strict else r"\{"
    barred = rf"{_SPACE}{starts}(?s:.*)|(?s:.*)<function=[ \t]*(?:{names})[ \t]*>(?s:.*)"
    return f"{ANY} & ~{regex(barred)}"


def relocated(schema: Any) -> Any:
    """The schema with references to its root changed to `$defs/tool`."""

    def change(found: dict[str, Any]) -> dict[str, Any]:
        reference = found.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            found["$ref"] = "#/$defs/tool" + reference[1:]
        return found

    return mapped(schema, change)


@dataclass
class _Shape:
    """Object schemas that apply together."""

    schemas: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def required(self) -> list[str]:
        found = [name for schema in self.schemas for name in schema.get("required") or []]
        return list(dict.fromkeys(name for name in found if isinstance(name, str)))

    def names(self) -> list[str]:
        listed = [name for schema in self.schemas for name in schema.get("properties") or {}]
        return list(dict.fromkeys([*listed, *self.required]))

    def conditions(self, name: str) -> list[Any]:
        """The schemas that a parameter must satisfy."""
        found = []
        for schema in self.schemas:
            own = [schema["properties"][name]] if name in (schema.get("properties") or {}) else []
            for pattern, condition in (schema.get("patternProperties") or {}).items():
                if not re.fullmatch(r"\^[A-Za-z0-9_-]+", pattern):  # patterns of clients are not run here
                    raise Unenforceable(
                        "patternProperties beside named parameters cannot be enforced unless they begin so: ^text"
                    )
                if name.startswith(pattern[1:]):
                    own.append(condition)
            found += own or [schema.get("additionalProperties", True)]
        return found


def _shapes(schema: Any, root: Any, depth: int) -> list[_Shape]:
    """All combinations of subschemas that satisfy an object schema."""
    if schema is True or schema == {}:
        return [_Shape()]
    if not isinstance(schema, Mapping) or depth > 16:
        raise Unenforceable(
            "the parameters are not the schema of an object" if depth <= 16 else "$ref is nested too deeply"
        )
    for keyword in _ROOT_UNENFORCEABLE:
        if keyword in schema:
            raise Unenforceable(f"{keyword} cannot be enforced for all parameters together")
    named = schema.get("type", "object")
    if named != "object" and not (isinstance(named, list) and "object" in named):
        raise Unenforceable("type of the parameters is not object")
    for keyword, kind in (("properties", Mapping), ("patternProperties", Mapping), ("required", list)):
        if not isinstance(schema.get(keyword, kind()) if kind is list else schema.get(keyword, {}), kind):
            raise Unenforceable(f"{keyword} is not as JSON schema has it")
    factors = [[_Shape([schema])]]
    if "$ref" in schema:
        found = target(root, schema["$ref"])
        if found is None:
            raise Unenforceable(f"$ref {str(schema['$ref'])[:100]!r} points to nothing within the schema")
        factors.append(_shapes(found, root, depth + 1))
    for entry in schema.get("allOf") or []:
        factors.append(_shapes(entry, root, depth + 1))
    for keyword in ("anyOf", "oneOf"):
        if schema.get(keyword):
            choices = [_shapes(entry, root, depth + 1) for entry in schema[keyword]]
            if keyword == "oneOf" and not _exclude_each_other(choices):
                raise Unenforceable(
                    "oneOf cannot be enforced unless a required parameter has other constants in each choice"
                )
            factors.append([shape for choice in choices for shape in choice])
    count = 1
    for factor in factors:
        count *= len(factor)
    if count > _MAX_SHAPES:
        raise Unenforceable(
            f"anyOf leaves {count:,} combinations of parameters, and at most {_MAX_SHAPES} can be enforced"
        )
    shapes = [_Shape([each for part in chosen for each in part.schemas]) for chosen in product(*factors)]
    for shape in shapes:
        _check_count(shape)
    return shapes


def _check_count(shape: _Shape) -> None:
    for schema in shape.schemas:
        if schema.get("minProperties", 0) > len(shape.required):
            raise Unenforceable("minProperties cannot be enforced beyond the number of required parameters")
        if schema.get("maxProperties", len(shape.names())) < len(shape.names()):
            raise Unenforceable("maxProperties cannot be enforced below the number of named parameters")


def _exclude_each_other(choices: list[list[_Shape]]) -> bool:
    """Whether the choices exclude each other, by the constants of a parameter that all of them require."""
    shapes = [shape for choice in choices for shape in choice]
    for name in shapes[0].required if shapes else []:
        seen: list[str] = []
        for shape in shapes:
            conditions = shape.conditions(name) if name in shape.required else []
            given = [entry for entry in conditions if isinstance(entry, Mapping) and {"const", "enum"} & entry.keys()]
            if not given:
                break
            values = [given[0]["const"]] if "const" in given[0] else given[0]["enum"]
            seen += {json.dumps(value, sort_keys=True) for value in values if kind_of(value) != "number"} or ["?"]
        else:
            if len(set(seen)) == len(seen) and "?" not in seen:
                return True
    return len(choices) < 2


def _value(
    rule: str, conditions: list[Any], types: frozenset[str], root: Any, texts: TextRules, json_rule: JsonRule
) -> list[str]:
    """An expression for a value including its end, and the lines it needs. `types` are those that the parser tries."""
    schema: Any = conditions[0] if len(conditions) == 1 else {"allOf": [entry for entry in conditions if entry != {}]}
    end, lines, choices = literal("\n</parameter>\n"), [], []
    text = texts.expression(schema) if not types or "string" in types else None
    if text is not None:
        parts = ["IN_VALUE"] if text == ANY else [text, "IN_VALUE"]
        taken = [_READ_AS[kind] for kind in sorted(types - {"string"})]
        if taken:
            read = "|".join(dict.fromkeys(taken))
            parts.append("~" + regex(rf"{_SPACE}(?:{read}){_SPACE}(?:\n(?s:.*))?"))
        lines.append(f"{rule.upper()}_V: ({' & '.join(parts)}) {end}")
        choices.append(f"{rule.upper()}_V")
    own = value_types(schema, root)
    kinds = types & own - {"string"}
    if kinds:
        named = sorted(kinds - {"integer"} if "number" in kinds else kinds)
        document: dict[str, Any] = {"x-guidance": COMPACT if text is not None else WHITE_SPACE}
        document |= {"allOf": [relocated(schema)], "type": named} if own - kinds or own == ALL else relocated(schema)
        if _refers(schema):
            document["$defs"] = {"tool": relocated(root)}
        lines.append(f"{rule}_json: {json_rule(document)}")
        choices.append(f"{rule}_json {end}")
    if not choices:
        raise Unenforceable("no value satisfies type, enum and const of a parameter together")
    return [f"({' | '.join(choices)})", *lines]


def _free(rule: str, shape: _Shape, root: Any, texts: TextRules, json_rule: JsonRule) -> list[str]:
    """Rules for parameters with open names, if the schema constrains them."""
    patterns = {pattern: entry for schema in shape.schemas for pattern, entry in _patterns(schema).items()}
    others = [schema.get("additionalProperties", True) for schema in shape.schemas]
    described = [entry for entry in others if isinstance(entry, Mapping) and entry]
    if not patterns and (not described or False in others):
        return []
    if any("maxProperties" in schema for schema in shape.schemas):
        raise Unenforceable("maxProperties cannot be enforced where names of parameters are open")
    if patterns and len(shape.schemas) > 1:
        raise Unenforceable("patternProperties inside allOf, anyOf or $ref cannot be enforced")
    types = parameter_types(root, "\n")  # the types of an unlisted name
    name = r"/[^<>\s](?:[^<>\n]{0,62}[^<>\s])?/"
    listed = " | ".join(literal(key) for key in shape.names())
    named = f"{name} & ~({listed})" if listed else name
    choices, lines = [], []
    held = [regex(whole_pattern(pattern)) for pattern in patterns]
    for index, condition in enumerate(patterns.values()):
        if condition is not False:
            apart = "".join(f" & ~{other}" for other in held if other != held[index])
            choices.append((f"{named} & {held[index]}{apart}", [condition]))
    if described and False not in others:
        choices.append((named + "".join(f" & ~{other}" for other in held), others))
    for index, (names, conditions) in enumerate(choices):
        part = f"{rule}_{index}"
        value = _value(part, conditions, types, root, texts, json_rule)
        lines += [f"{part.upper()}_N: {names}", f'{part}: "<parameter=" {part.upper()}_N ">\\n" {value[0]}', *value[1:]]
    return [f"{rule}: {' | '.join(f'{rule}_{index}' for index in range(len(choices)))}", *lines] if choices else []


def _patterns(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = schema.get("patternProperties") or {}
    return found


def _refers(schema: Any) -> bool:
    return '"$ref"' in json.dumps(schema)


def _escaped(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_ -]", lambda found: f"\\x{{{ord(found.group()):x}}}", text)
