"""Structured output: a request's schema or tools as a grammar, and the grammar as the engine's token mask.

Grammars are written and checked in the server; the mask is made from them in the engine process. llguidance compiles
schemas itself: it fetches nothing, runs nothing of them, and its limits on size and work hold for hostile ones.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from stoker.server.errors import ApiError
from stoker.server.grammar import Grammar, checked
from stoker.server.parse.reasoning import CLOSE as THOUGHT_END
from stoker.server.parse.tools import CLOSE, OPEN
from stoker.server.parse.values import STRING, parameter_types
from stoker.server.protocol.common import ResponseFormat, StructuredOutputs
from stoker.server.served import ServedModel
from stoker.speculate.mask import TokenMask

Mask = Callable[[], TokenMask]
LARGEST_SCHEMA = 256 * 1024  # characters of JSON
# At most that much white space between two parts of a JSON text: enough to indent, and no model can get lost in it.
WHITE_SPACE = {"whitespace_flexible": True, "whitespace_pattern": "[ \\t\\n]{0,24}"}


def answer_mask(
    model: ServedModel, wanted: ResponseFormat | None, outputs: StructuredOutputs | None, thinking: bool
) -> Mask | None:
    """The mask for `response_format` or vLLM's `structured_outputs`; None where any text will do."""
    rules = _outputs_rules(outputs) if outputs else None
    if wanted is not None and wanted.type != "text":
        if rules is not None:
            raise ApiError(400, "response_format and structured_outputs cannot both be given.")
        if wanted.type == "json_object":
            rules = _json_rules({"type": "object"})
        else:
            schema = wanted.json_schema.schema_ if wanted.json_schema else None
            if schema is None:
                raise ApiError(400, "response_format is json_schema, but it has no schema.", param="response_format")
            rules = _json_rules(schema)
    return None if rules is None else grammar_mask(model, rules, thinking)


def call_mask(model: ServedModel, schemas: Mapping[str, Any], parallel: bool, thinking: bool) -> Mask:
    """The mask that makes an answer a call of one of these tools, or with `parallel` several calls."""
    opened, closed = _tag(model, OPEN), _tag(model, CLOSE)
    lines = [f"answer: call {'(NEWLINE call)*' if parallel else ''}", "NEWLINE: /\\n/"]
    lines.append("call: " + " | ".join(f"call_{place}" for place in range(len(schemas))))
    for place, (name, schema) in enumerate(schemas.items()):
        if model.calls_in_json:
            lines += _json_call(place, name, schema, opened, closed)
        else:
            lines += _xml_call(place, name, schema, opened, closed)
    return grammar_mask(model, "\n".join(lines), thinking)


def grammar_mask(model: ServedModel, rules: str, thinking: bool) -> Mask:
    """`rules` define `answer`. While the model thinks, only the end of its answer is barred."""
    after = None
    if thinking:
        after = model.token_id(THOUGHT_END)
        if after is None:
            raise ApiError(
                400,
                f"Structured output cannot begin after a thought here, since {THOUGHT_END} is no token of this model. "
                'Send chat_template_kwargs {"enable_thinking": false}.',
            )
    start = "start: GAP answer\nGAP: /\\n{0,2}/" if thinking else "start: answer"
    grammar = Grammar(model.directory, f"{start}\n{rules}", model.vocab_size, model.stop_ids, after)
    problem = checked(grammar)
    if problem:
        raise ApiError(400, f"The schema or grammar cannot be used: {problem}")
    return grammar


def _outputs_rules(outputs: StructuredOutputs) -> str:
    given = {name: value for name, value in outputs if value is not None}
    if len(given) != 1:
        raise ApiError(400, "structured_outputs takes exactly one of json, regex, choice and grammar.")
    if outputs.json_ is not None:
        try:
            schema = json.loads(outputs.json_) if isinstance(outputs.json_, str) else outputs.json_
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"structured_outputs.json is no JSON: {error}.") from error
        return _json_rules(schema)
    if outputs.choice is not None:
        if not outputs.choice:
            raise ApiError(400, "structured_outputs.choice is empty.")
        return "answer: " + " | ".join(_literal(choice) for choice in outputs.choice)
    if outputs.regex is not None:
        return f"answer: /{outputs.regex.replace('/', chr(92) + '/')}/"
    return str(outputs.grammar).replace("start:", "answer:", 1)


def _json_rules(schema: Any) -> str:
    return f"answer: {_json(schema)}"


def _json(schema: Any, root: Mapping[str, Any] | None = None) -> str:
    """A schema in a rule. `root` has the definitions that references in it point to."""
    if not isinstance(schema, Mapping):
        schema = {} if schema else {"not": {}}
    found: dict[str, Any] = {**schema, "x-guidance": WHITE_SPACE}
    for name in ("$defs", "definitions"):
        if root and name in root and name not in found:
            found[name] = root[name]
    try:
        text = json.dumps(found)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "The schema is nested too deeply.") from error
    if len(text) > LARGEST_SCHEMA:
        raise ApiError(400, f"The schema has {len(text):,} characters, and at most {LARGEST_SCHEMA:,} are taken.")
    return f"%json {text}"


def _json_call(place: int, name: str, schema: Any, opened: str, closed: str) -> list[str]:
    call = {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": schema or {"type": "object"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    rule, root = f"call_{place}", schema if isinstance(schema, Mapping) else None
    return [f"{rule}: {opened} NEWLINE {rule}_json NEWLINE {closed}", f"{rule}_json: {_json(call, root)}"]


def _xml_call(place: int, name: str, schema: Any, opened: str, closed: str) -> list[str]:
    """Parameters in the order of the schema, those that are not required at the model's choice."""
    schema = schema if isinstance(schema, Mapping) else {}
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    parts, lines = [], []
    for number, (key, value) in enumerate(properties.items()):
        if ">" in key or "\n" in key:
            raise ApiError(400, f"tool {name!r} has a parameter {key[:100]!r}, which cannot be written in a call.")
        rule = f"p_{place}_{number}"
        parts.append(rule if key in required else f"{rule}?")
        lines += _xml_parameter(rule, key, value, schema)
    head, tail = _literal(f"\n<function={name}>\n"), _literal("</function>\n")
    return [f"call_{place}: {opened} {head} {' '.join(parts)} {tail} {closed}", *lines]


def _xml_parameter(rule: str, key: str, schema: Any, root: Mapping[str, Any]) -> list[str]:
    start, end = _literal(f"<parameter={key}>\n"), _literal("\n</parameter>\n")
    if not parameter_types(root, key) <= STRING:
        return [f"{rule}: {start} {rule}_json {end}", f"{rule}_json: {_json(schema, root)}"]
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return [f"{rule}: {start} ({' | '.join(map(_literal, choices))}) {end}"]
    newline = _literal("\n")  # any text up to the closing tag, the newline before it included
    return [f"{rule}: {start} {rule}_text {newline}", f'{rule}_text[suffix="</parameter>"]: /(?s:.*)/']


def _tag(model: ServedModel, tag: str) -> str:
    """A tag that is one token is named as such; grammars never spell those."""
    return tag if model.token_id(tag) is not None else _literal(tag)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
