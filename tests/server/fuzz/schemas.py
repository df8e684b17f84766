"""JSON schemas and grammars: what tools and formats ask for, and what would hurt a server that trusted them."""

from typing import Any

from tests.server.fuzz.draw import Draw, Raw

Json = dict[str, Any]
FORMATS = (
    "date",
    "date-time",
    "time",
    "email",
    "uuid",
    "ipv4",
    "ipv6",
    "uri",
    "hostname",
    "duration",
    "made-up",
    "regex",
)
PATTERNS = (
    "^[a-z]{1,5}$", "[0-9]+", "^(a|b)*c$", "x|y", "\\d{3}-\\d{4}", "^\\p{L}+$", "^$", ".", "(", "[", "a{2,1}", "*a",
    "(?=a)b", "(a)\\1", "(?<!x)y", "\\", "a{100000}", "((a+)+)+$", "(?i)abc", "^^a$$",
)  # fmt: skip
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
GRAMMARS = (
    'start: "yes" | "no"', "start: /[0-9]{1,4}/", 'start: "(" start ")" | "x"', 'start: %json {"type": "integer"}',
    "start:", "", "start: start", "start: nothing", 'start: "a"*', "start: /(/", "%import common.WS",
    "start: <think>", "start: " + "(" * 300 + '"a"' + ")" * 300, "root ::= [a-z]+", 'start: "\x00"',
    "start: /(?s:.*)/",
)  # fmt: skip


def schema(draw: Draw, depth: int = 0) -> Any:
    """Sound, as far as single schemas go: what its parts ask for together may still be impossible."""
    kind = draw.choice(TYPES[:5] if depth > 2 else (*TYPES, "object", "object", "enum", "anyOf", "allOf", "oneOf"))
    if kind == "object":
        return object_schema(draw, depth)
    if kind in ("anyOf", "allOf", "oneOf"):
        return {kind: draw.several(3, lambda: schema(draw, depth + 1), least=1)}
    if kind == "enum":
        return {"enum": draw.several(4, lambda: draw.choice(("a", "b c", 1, 2.5, True, None, "é", "")), least=1)}
    found: Json = {"type": draw.choice((kind, kind, kind, [kind, "null"]))}
    if kind == "string":
        found |= draw.some(
            0.2,
            {
                "pattern": lambda: draw.choice(PATTERNS[:8]),
                "format": lambda: draw.choice(FORMATS),
                "minLength": lambda: draw.randrange(4),
                "maxLength": lambda: draw.randrange(4, 40),
                "description": draw.text,
            },
        )
    elif kind in ("integer", "number"):
        limits = {"minimum": -3, "maximum": 7, "exclusiveMinimum": 0, "exclusiveMaximum": 9.5, "multipleOf": 2}
        found |= {name: value for name, value in limits.items() if draw.chance(0.2)}
    elif kind == "array":
        found |= {"items": schema(draw, depth + 1)} if draw.chance(0.8) else {}
        found |= draw.some(0.2, {"minItems": lambda: draw.randrange(3), "maxItems": lambda: draw.randrange(3, 6)})
    return found


def object_schema(draw: Draw, depth: int = 0) -> Json:
    names = draw.sample(("city", "seats", "when", "note", "kind", "a b", "ключ", "$x", "_", "1"), draw.randint(0, 4))
    found: Json = {"type": "object", "properties": {name: schema(draw, depth + 1) for name in names}}
    if names and draw.chance(0.7):
        found["required"] = draw.sample(names, draw.randint(1, len(names)))
    if draw.chance(0.4):
        found["additionalProperties"] = draw.weighted((8, False), (1, True), (1, {"type": "integer"}))
    if draw.chance(0.15):
        found["$defs"] = {"d": schema(draw, depth + 1)}
        found["properties"]["ref"] = {
            "$ref": draw.choice(("#/$defs/d", "#/$defs/d", "#", "#/$defs/none", "other.json"))
        }
    return found


def hostile_schema(draw: Draw) -> Any:
    number = draw.choice((2, 10, 60))
    return draw.choice(
        (
            lambda: {"$ref": "#"},
            lambda: {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            lambda: {"properties": {"next": {"$ref": "#"}}, "required": ["next"], "type": "object"},
            lambda: {"$ref": "#/$defs/d0", "$defs": _chain(number * 10)},
            lambda: {"$ref": "#/anyOf/" + draw.choice(("0", "9" * 5000, "-1", "٣", "1.5")), "anyOf": [{}, {}]},
            lambda: {
                "$ref": draw.choice((5, None, [], "", "#/", "#/%zz", "#/~2", "http://127.0.0.1/", "file:///dev/zero"))
            },
            lambda: {"$dynamicRef": "#x", "$recursiveRef": "#"},
            lambda: {"type": "string", "pattern": draw.choice(PATTERNS)},
            lambda: {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(1, number // 3 + 2)]},
            lambda: {"type": "string", "pattern": f"(a|b)*a(a|b){{{number}}}"},
            lambda: {"enum": [f"value {i}" for i in range(number * 40)]},
            lambda: {"enum": draw.choice(([], [[]], [{}], ["\x00"], ["x" * 20_000], [1e308, -0.0], "a"))},
            lambda: {"const": draw.choice((None, [], {"a": [1]}, "\x00\x7f", 2**70, 0.1, True))},
            lambda: _nested(draw.choice(("items", "not", "additionalProperties")), number * 4),
            lambda: _listed(draw.choice(("allOf", "anyOf", "oneOf")), number * 4),
            lambda: {"allOf": [{"anyOf": [{"type": each} for each in TYPES]} for _ in range(number)]},
            lambda: {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(number * 5)}},
            lambda: {
                "type": "object",
                "anyOf": [{"required": [f"r{i}"]} for i in range(number)],
                "minProperties": number,
            },
            lambda: {
                "type": "object",
                "properties": {draw.choice(("<", "\n", "", " a ", "a" * 3000)): {"type": "string"}},
            },
            lambda: {
                "type": "object",
                "patternProperties": {draw.choice(PATTERNS): {}},
                "propertyNames": {"minLength": 2},
            },
            lambda: {
                "type": "array",
                "minItems": draw.choice((number, 10**6, 2**63, -1)),
                "items": {"type": "integer"},
            },
            lambda: {
                "type": "string",
                "minLength": draw.choice((1000, 10**7, 2**63)),
                "maxLength": draw.choice((5, 10**9)),
            },
            lambda: {
                "type": "number",
                "multipleOf": draw.choice((0, -1, 1e-300, 1e300)),
                "minimum": draw.choice((1e308, -5)),
            },
            lambda: {"type": "integer", "minimum": -(2**70), "maximum": draw.choice((2**70, -(2**71)))},
            lambda: {"type": draw.choice(("teapot", "", [], ["string", 5], None, 7, "dict", "float"))},
            lambda: {"if": {"type": "string"}, "then": {"minLength": 2}, "else": False},
            lambda: {"prefixItems": [True, False], "unevaluatedItems": False, "contains": {"type": "null"}},
            lambda: {
                "type": "object",
                "required": draw.choice(("a", [5], [["a"]], {"a": 1}, ["missing"])),
                "properties": [],
            },
            lambda: {"dependentRequired": {"a": ["b"]}, "dependencies": {"a": {}}, "unevaluatedProperties": False},
            lambda: {"x-guidance": {"whitespace_pattern": draw.choice(PATTERNS), "lenient": True}, "type": "object"},
            lambda: {"properties": schema(draw), "items": [schema(draw)], "definitions": 5},
            lambda: draw.choice((True, False, [], 5, "x", None, {})),
        )
    )()


def any_schema(draw: Draw) -> Any:
    return schema(draw) if draw.chance(0.8) else hostile_schema(draw)


def grammar(draw: Draw) -> str:
    return draw.choice(GRAMMARS)


def pattern(draw: Draw) -> str:
    return draw.choice(PATTERNS)


def _chain(length: int) -> Json:
    return {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)} | {f"d{length}": {"type": "integer"}}


def _nested(keyword: str, depth: int) -> Raw:
    return Raw(f'{{"{keyword}":' * depth + '{"type":"integer"}' + "}" * depth)


def _listed(keyword: str, depth: int) -> Raw:
    return Raw(f'{{"{keyword}":[' * depth + '{"type":"integer"}' + ',{"type":"boolean"}]}' * depth)
