"""Calls hold the whole schema of their tool: what the grammar lets through parses to arguments that validate."""

import json
import random
from typing import Any

import jsonschema
import pytest

from stoker.demo import EMBEDDED
from stoker.engine.grammar.mask import GrammarMask
from stoker.engine.rules import Grammar
from stoker.server.errors import ApiError
from stoker.server.model import ServedModel
from stoker.server.output.answer import AnswerParser
from stoker.server.output.pieces import Call
from stoker.server.output.tool_schemas import standard
from stoker.server.prepare.structured import Mask, call_mask, strict_mask
from tests.server.output.test_answer import message_of
from tests.support.extent import ALL

CASES = 2000 if ALL else 200
LONGEST = 160  # tokens of a random call; those that run on are given up
DEFS = {
    "word": {"type": "string", "pattern": "^[a-z]{1,6}$"},
    "size": {"enum": ["s", "m", 3, None]},
    "point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    "again": {"$ref": "#/$defs/word"},
}


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel(EMBEDDED, ["demo"], 8192, {})


@pytest.fixture(scope="module")
def json_model() -> ServedModel:
    found = ServedModel(EMBEDDED, ["demo"], 8192, {})
    found.calls_in_json = True
    return found


def tool(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), **more}


def made(mask: Mask) -> Grammar:
    assert isinstance(mask, Grammar)
    return mask


def accepts(model: ServedModel, mask: Mask, text: str) -> bool:
    """Whether a whole answer passes the mask, its end included."""
    grammar, tokens = made(mask), model.encode(text)
    rules = GrammarMask(grammar)
    for place, token in enumerate(tokens):
        allowed = rules.allowed(tokens[:place])
        if allowed is not None and not allowed[token]:
            return False
    allowed = rules.allowed(tokens)
    return allowed is None or bool(allowed[list(grammar.ends)].any())


def written(name: str, parameters: dict[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def parsed(text: str, schemas: dict[str, Any], thinking: bool = False) -> list[Call]:
    parser = AnswerParser(thinking, schemas)
    return message_of(parser.push(text) + parser.finish()).calls


STRINGS = [
    ({"type": "string", "pattern": "^[a-z]+$"}, ["abc"], ["Abc", "", "a1"]),
    ({"type": "string", "pattern": "b|^c$"}, ["abc", "c"], ["ac", "cc"]),
    ({"type": "string", "pattern": "^[\\d/^$|]{2}$"}, ["1/", "^|"], ["1", "ab"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "éő🙂"], ["a", "abcd"]),
    ({"const": "a b"}, ["a b"], ["a", "a b "]),
    ({"enum": ["a", "", 'q"\\']}, ["a", "", 'q"\\'], ["b"]),
    ({"type": "string", "format": "date"}, ["2024-02-28"], ["2024-02-31", "today"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
    ({"type": "string", "format": "email"}, ["a.b@c.de"], ["a@", "a"]),
    ({"type": "string", "format": "ipv6"}, ["::1", "1::", "1:2:3:4:5:6:7:8", "1::8"], ["1", ":::", "1:2"]),
    ({"type": "string", "format": "int64"}, ["made-up formats say nothing"], []),
    ({"$ref": "#/$defs/word"}, ["abc"], ["ABC"]),
    ({"$ref": "#/$defs/again", "maxLength": 3}, ["abc"], ["abcd", "A"]),
    ({"allOf": [{"$ref": "#/$defs/word"}, {"pattern": "z"}]}, ["az"], ["a", "Z"]),
    ({"anyOf": [{"const": "x"}, {"type": "string", "minLength": 4}]}, ["x", "long"], ["y"]),
    ({"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, ["a", "c"], ["b", "d"]),
    ({"type": "string", "not": {"enum": ["no"]}}, ["yes", "not"], ["no"]),
    ({"type": ["string", "null"], "maxLength": 5}, ["abc", "null", "nul"], ["abcdef"]),
    ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 5}, {"type": "null"}]}, ["a", "7", "4 a"], ["4"]),
    ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/point"}]}, ["a", '{"x": 1}'], ['{"x": "y"}', "{"]),
    ({"$ref": "#/$defs/size"}, ["s", "3", "null"], ["4", "x"]),
    ({"type": "integer", "minimum": 2, "multipleOf": 3}, ["3", "9"], ["1", "4", "x"]),
    ({"type": "float", "maximum": 1}, ["0.5"], ["2", "x"]),
    ({"type": "int"}, ["5"], ["5.5", "x"]),
    ({"type": "dict"}, ['{"a": 1}'], ["a", "[1]"]),
    ({"type": "list"}, ["[1]"], ["a", "{}"]),
    ({"type": "bool"}, ["true"], ["yes"]),
    ({"items": {"type": "integer"}}, ["[1, 2]"], ['["a"]', "a"]),
    ({"properties": {"x": {"const": 1}}, "required": ["x"]}, ['{"x": 1}'], ['{"x": 2}', "a"]),
    ({"const": 5}, ["5"], ["6", "a"]),
    ({"type": "string"}, ["any\n\ntext </par", "<function=x>"], ["a</parameter>b", "x\n<parameter=b>\ny"]),
    ({}, ["5", "text"], []),
]


@pytest.mark.parametrize(("schema", "good", "bad"), STRINGS, ids=[json.dumps(case[0])[:60] for case in STRINGS])
def test_a_forced_call_holds_every_keyword_of_a_parameter(
    model: ServedModel, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    whole = tool({"a": schema}, **{"$defs": DEFS})
    mask = call_mask(model, {"f": whole}, parallel=False, thinking=False)
    for text in good:
        assert accepts(model, mask, written("f", {"a": text})), text
        arguments = json.loads(parsed(written("f", {"a": text}), {"f": whole})[0].arguments)
        jsonschema.validate(arguments, standard(whole))
    for text in bad:
        assert not accepts(model, mask, written("f", {"a": text})), text


ROOTS = [
    (
        {"allOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": tool({"a": {"type": "integer"}})}},
        [{"a": "1"}],
        [{"a": "x"}, {}],
    ),
    (
        {
            "properties": {"a": {"type": "string"}},
            "allOf": [{"required": ["a"]}, {"properties": {"a": {"maxLength": 2}}}],
        },
        [{"a": "xy"}],
        [{}, {"a": "xyz"}],
    ),
    (
        {
            "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": "x"}, {"b": "x"}, {"a": "x", "b": "y"}],
        [{}],
    ),
    (
        {
            "oneOf": [
                tool({"kind": {"const": "n"}, "v": {"type": "integer"}}),
                tool({"kind": {"const": "t"}, "v": {"type": "string", "maxLength": 3}}),
            ]
        },
        [{"kind": "n", "v": "1"}, {"kind": "t", "v": "abc"}],
        [{"kind": "n", "v": "abc"}, {"kind": "t", "v": "12"}],
    ),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"x y": "1", "z": "2"}], [{"x": "y"}]),
    (
        {"patternProperties": {"^x": {"type": "string"}, "^y": {"const": "1"}}, "additionalProperties": False},
        [{"xa": "t", "ya": "1"}],
        [{"z": "1"}, {"ya": "2"}],
    ),
    ({"properties": {"a": False, "b": True}, "required": ["b"]}, [{"b": "x"}], [{"a": "x", "b": "x"}]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), ROOTS)
def test_parameters_composed_of_several_schemas_are_held(
    model: ServedModel, schema: dict[str, Any], good: list[dict[str, str]], bad: list[dict[str, str]]
) -> None:
    mask = call_mask(model, {"f": schema}, parallel=False, thinking=False)
    for parameters in good:
        text = written("f", parameters)
        assert accepts(model, mask, text), text
        jsonschema.validate(json.loads(parsed(text, {"f": schema})[0].arguments), standard(schema))
    for parameters in bad:
        assert not accepts(model, mask, written("f", parameters)), parameters


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        (tool({"a": {"type": "string", "format": "iri"}}), "format"),
        (tool({"a": {"type": "string", "if": {}, "then": {}}}), "if"),
        (tool({"a": {"type": "string", "pattern": "(^a|b)"}}), "pattern"),
        (tool({"a": {"type": "string", "pattern": "\\bx"}}), "pattern"),
        (tool({"a": {"$ref": "#/$defs/none"}}), "$ref"),
        (tool({"a": {"$ref": "#/$defs/a"}}, **{"$defs": {"a": {"$ref": "#/$defs/a"}}}), "$ref"),
        (tool({"a": {"type": "array", "uniqueItems": True}}), "uniqueItems"),
        (tool({}, dependentRequired={"a": ["b"]}), "dependentRequired"),
        (tool({}, minProperties=2), "minProperties"),
        (tool({"a": {}}, propertyNames={"pattern": "b"}), "propertyNames"),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "oneOf"),
        ({"type": "string"}, "type"),
    ],
)
def test_what_cannot_be_held_is_refused_with_the_keyword_and_the_tool(
    model: ServedModel, schema: dict[str, Any], keyword: str
) -> None:
    schemas = {"fine": tool({"a": {"type": "string"}}), "odd": schema}
    with pytest.raises(ApiError) as caught:
        call_mask(model, schemas, parallel=True, thinking=False)
    assert caught.value.status == 400
    assert "'odd'" in caught.value.message
    assert keyword in caught.value.message


def random_value(chosen: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema for a parameter."""
    strings: list[dict[str, Any]] = [
        {"type": "string", "maxLength": chosen.randint(0, 4)},
        {"type": "string", "minLength": 1, "maxLength": 3},
        {"type": "string", "pattern": chosen.choice(["^[a-c]{1,3}$", "^x?[0-9]$", "^(?:ab|\\d{2})$"])},
        {"type": "string", "format": chosen.choice(["date", "time", "ipv4", "uuid"])},
        {"enum": chosen.sample(["a", "b c", "null", "1", ""], 2)},
        {"const": chosen.choice(["x", 'say "y"', "{"])},
    ]
    others: list[dict[str, Any]] = [
        {"type": "integer", "minimum": chosen.randint(-3, 3), "maximum": chosen.randint(4, 40)},
        {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": chosen.sample([1, 2.5, None, "t", True], 3)},
        {"$ref": f"#/$defs/{chosen.choice(list(DEFS))}"},
        {"type": "array", "items": {"enum": [1, "</parameter>", 'q"']}, "maxItems": 2},
        {"type": "object", "properties": {"k": {"type": "boolean"}}, "required": ["k"], "additionalProperties": False},
    ]
    if depth and chosen.random() < 0.4:
        parts = [random_value(chosen, depth - 1) for _ in range(2)]
        return {"anyOf": parts} if chosen.random() < 0.7 else {"allOf": [{"maxLength": 3}, {"$ref": "#/$defs/again"}]}
    return chosen.choice(strings + others)


def random_tool(chosen: random.Random) -> dict[str, Any]:
    properties = {name: random_value(chosen) for name in ("a", "b", "c")[: chosen.randint(1, 3)]}
    required = [name for name in properties if chosen.random() < 0.7]
    whole: dict[str, Any] = {"type": "object", "properties": properties, "required": required, "$defs": DEFS}
    if chosen.random() < 0.3:
        name = next(iter(properties))
        whole["allOf"] = [{"required": [name]}, {"properties": {name: properties[name]}}]
    return whole


def random_answer(model: ServedModel, mask: Mask, chosen: random.Random) -> str | None:
    """An answer of a model that picks any token the rules allow, sooner an end than not; None if it runs on."""
    grammar = made(mask)
    rules, output = GrammarMask(grammar), list[int]()
    while len(output) < LONGEST:
        allowed = rules.allowed(output)
        assert allowed is not None
        if allowed[list(grammar.ends)].any():
            return model.decode(output)
        ids = allowed.nonzero().flatten().tolist()
        newline = [token for token in model.encode("\n</parameter>\n")[:1] if allowed[token]]
        output.append(newline[0] if newline and chosen.random() < 0.2 else chosen.choice(ids))
    return None


@pytest.mark.parametrize("form", ["xml", "json"])
def test_whatever_the_grammar_lets_through_validates(model: ServedModel, json_model: ServedModel, form: str) -> None:
    """Random schemas, and random legal answers to them; 2,000 in `make test-all`."""
    used = model if form == "xml" else json_model
    ended = refused = 0
    for seed in range(CASES // 2):
        chosen = random.Random(f"{form} {seed}")
        schema = random_tool(chosen)
        try:
            mask = call_mask(used, {"f": schema}, parallel=False, thinking=False)
        except ApiError:  # parts that exclude each other, mostly
            refused += 1
            continue
        text = random_answer(used, mask, chosen)
        if text is None:
            continue
        ended += 1
        calls = parsed(text, {"f": schema})
        assert [call.name for call in calls] == ["f"], (seed, text)
        jsonschema.validate(json.loads(calls[0].arguments), standard(schema))
    assert ended > CASES // 8, (ended, refused)


def test_strict_tools_are_held_once_a_call_has_begun(model: ServedModel) -> None:
    schemas = {"held": tool({"n": {"type": "integer"}}), "loose": tool({"n": {"type": "integer"}})}
    right, wrong = written("held", {"n": "1"}), written("held", {"n": "x"})
    mixed = strict_mask(model, schemas, ["held"])
    every = strict_mask(model, schemas, ["held", "loose"])
    for mask in (mixed, every):
        assert accepts(model, mask, "just text, <function=held> even")
        assert accepts(model, mask, f"text\n{right}\n{right} and more")
        assert accepts(model, mask, f"I may write <tool_call> here.\n</think>\n\n{right}"), "a mention in a thought"
        assert accepts(model, mask, f"I look.\n{right}")
        assert not accepts(model, mask, wrong)
        assert not accepts(model, mask, f"{right}\n{wrong}")
        assert not accepts(model, mask, f"thought\n</think>\n\n{wrong}")
        assert not accepts(model, mask, "<tool_call>\n<function=held>\n"), "half a call may not end"
        assert not accepts(model, mask, '<tool_call>\n{"name": "held", "arguments": {}}\n</tool_call>')
    loose = written("loose", {"n": "x"})
    assert accepts(model, mixed, f"{loose}\n{right}")
    assert not accepts(model, mixed, loose.replace("</function>", "</function><function=held>"))
    assert not accepts(model, every, loose)
    assert not accepts(model, every, written("unknown", {}))


def test_strict_tools_are_held_in_the_json_form(json_model: ServedModel) -> None:
    schemas = {"held": tool({"n": {"type": "integer"}}), "loose": {}}
    mask = strict_mask(json_model, schemas, ["held"])

    def call(name: str, arguments: Any) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    assert accepts(json_model, mask, f"text {call('held', {'n': 1})}\n{call('loose', {'any': 'thing'})}")
    assert not accepts(json_model, mask, call("held", {"n": "x"}))
    assert not accepts(json_model, mask, call("held", {}))
