"""Structured output: the schema or the tools of a request become a grammar, which constrains the engine's tokens.

The server writes grammars; llguidance compiles them in worker processes, once to check and once for the engine. It
fetches and executes nothing of a schema, and a grammar that makes it hang or crash is refused.
"""

import json
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from stoker.engine.rules import Grammar
from stoker.server.errors import RETRY_S, ApiError
from stoker.server.model import ServedModel, check_text
from stoker.server.output.answer import CLOSE as THOUGHT_END
from stoker.server.output.tags import CLOSE, OPEN
from stoker.server.output.tool_schemas import standard
from stoker.server.prepare.grammar_check import ChecksBusy, TooComplex, check
from stoker.server.prepare.string_grammar import Unenforceable
from stoker.server.prepare.tool_grammar import COMMON_RULES, WHITE_SPACE, free_text, json_call, xml_call
from stoker.server.schemas.common import ResponseFormat, StructuredOutputs

if TYPE_CHECKING:
    from stoker.sampling.mask import TokenMask

Mask = Callable[[], "TokenMask"]
LARGEST_SCHEMA = 256 * 1024  # characters of JSON
TOO_COMPLEX = "grammar_too_complex"
LARGEST_GRAMMAR = 1024 * 1024  # characters of all schemas of a request and the rules around them


def answer_mask(
    model: ServedModel, wanted: ResponseFormat | None, outputs: StructuredOutputs | None, thinking: bool
) -> Mask | None:
    """The mask for `response_format` or vLLM's `structured_outputs`; None if the answer is unconstrained."""
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
    """The mask that forces a call of one of these tools, or with `parallel` one or more calls."""
    opened, closed = _tag(model, OPEN), _tag(model, CLOSE)
    answer = f"answer: {opened} call {closed} {f'(NEWLINE {opened} call {closed})*' if parallel else ''}"
    return _tool_mask(
        schemas, lambda chosen: grammar_mask(model, "\n".join([answer, *_calls(model, chosen)]), thinking)
    )


def strict_mask(model: ServedModel, schemas: Mapping[str, Any], strict: Collection[str]) -> Mask:
    """The mask that leaves text unconstrained until a call begins, and holds calls of strict tools to their schema."""
    opened, closed = model.token_id(OPEN), model.token_id(CLOSE)
    if opened is None or closed is None:
        raise ApiError(
            400,
            f"strict tools cannot be enforced with tool_choice auto here, since {OPEN} is not a token of this model. "
            "Send tool_choice required, or leave strict out.",
        )
    ends = [CLOSE, OPEN, *([THOUGHT_END] if model.token_id(THOUGHT_END) is not None else [])]
    others = [name for name in schemas if name not in strict]
    answer = [f"start: call {CLOSE} | other | FREE_TEXT ({' | '.join(ends)})?"]
    if others and model.calls_in_json:
        call = {
            "type": "object",
            "properties": {"name": {"enum": others}, "arguments": {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
            "x-guidance": WHITE_SPACE,
        }
        answer += [f"other: NEWLINE other_json NEWLINE {CLOSE}", f"other_json: {_json_rule(call)}"]
    else:
        answer[0] = answer[0].replace("other | ", "")
    answer.append(f"FREE_TEXT: {free_text(list(strict), not others)}")
    token_ids = tuple(token for tag in (CLOSE, THOUGHT_END) if (token := model.token_id(tag)) is not None)

    def mask(chosen: Mapping[str, Any]) -> Mask:
        rules = "\n".join([*answer, *_calls(model, chosen)])
        return _checked(Grammar(model.directory, rules, model.vocab_size, model.stop_ids, None, opened, token_ids))

    return _tool_mask({name: schemas[name] for name in strict}, mask)


def _tool_mask(schemas: Mapping[str, Any], mask: Callable[[Mapping[str, Any]], Mask]) -> Mask:
    """The mask for these tools, or an error that names the tool at fault."""
    try:
        return mask(schemas)
    except ApiError as error:
        if error.status != 400 or error.code == TOO_COMPLEX:  # checking each tool would take as long again
            raise
        for name, schema in schemas.items() if len(schemas) > 1 else ():
            _tool_mask({name: schema}, mask)  # raises for that one
        if len(schemas) == 1 and not error.message.startswith("tool "):
            raise ApiError(400, f"tool {next(iter(schemas))!r}: {error.message}", param="tools") from error
        raise


def _calls(model: ServedModel, schemas: Mapping[str, Any]) -> list[str]:
    """Grammar rules for `call`: what stands between the tags."""
    lines = [*COMMON_RULES, "call: " + " | ".join(f"call_{index}" for index in range(len(schemas)))]
    for index, (name, schema) in enumerate(schemas.items()):
        form = json_call if model.calls_in_json else xml_call
        try:
            lines += form(f"call_{index}", name, standard(schema), _json_rule)
        except (Unenforceable, TypeError, AttributeError, RecursionError) as error:
            reason = str(error) if isinstance(error, Unenforceable) else "its schema is malformed or nested too deeply"
            raise ApiError(
                400, f"tool {name[:100]!r} cannot be held to its schema: {reason}.", param="tools"
            ) from error
    return lines


def grammar_mask(model: ServedModel, rules: str, thinking: bool) -> Mask:
    """The mask for `rules`, which define `answer`. While the model thinks, only ending the answer is barred."""
    after = None
    if thinking:
        after = model.token_id(THOUGHT_END)
        if after is None:
            raise ApiError(
                400,
                f"Structured output cannot begin after a thought here: {THOUGHT_END} is not a token of this model. "
                'Send chat_template_kwargs {"enable_thinking": false}.',
            )
    start = "start: GAP answer\nGAP: /\\n{0,2}/" if thinking else "start: answer"
    return _checked(Grammar(model.directory, f"{start}\n{rules}", model.vocab_size, model.stop_ids, after))


def _checked(grammar: Grammar) -> Grammar:
    check_text(grammar.lark, "The schema or grammar")
    if len(grammar.lark) > LARGEST_GRAMMAR:
        raise ApiError(
            400, f"The grammar has {len(grammar.lark):,} characters, and at most {LARGEST_GRAMMAR:,} are taken."
        )
    try:
        problem = check(grammar)
    except ChecksBusy as error:
        raise ApiError(503, str(error), retry_after=RETRY_S) from error
    except TooComplex as error:
        raise ApiError(400, f"The schema or grammar cannot be used: {error}", code=TOO_COMPLEX) from error
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
            raise ApiError(400, f"structured_outputs.json is not JSON: {error}.") from error
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


def _json(schema: Any) -> str:
    if not isinstance(schema, Mapping):
        schema = {} if schema else {"not": {}}
    return _json_rule({**schema, "x-guidance": WHITE_SPACE})


def _json_rule(schema: Mapping[str, Any]) -> str:
    """A JSON schema as part of a grammar rule, with a limit on its size."""
    try:
        text = json.dumps(schema)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "The schema is nested too deeply.") from error
    if len(text) > LARGEST_SCHEMA:
        raise ApiError(400, f"The schema has {len(text):,} characters, and at most {LARGEST_SCHEMA:,} are taken.")
    return f"%json {text}"


def _tag(model: ServedModel, tag: str) -> str:
    """A tag as a grammar symbol: a special token is referred to by name, since grammars never spell those."""
    return tag if model.token_id(tag) is not None else _literal(tag)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
