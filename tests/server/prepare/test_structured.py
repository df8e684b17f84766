"""Structured output: the grammar holds at every token, drafted or not, and what comes out validates."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer
from torch import Tensor

from stoker.backends.cpu.build import cpu_backend
from stoker.backends.network.load import load_model
from stoker.demo import EMBEDDED, prompts
from stoker.engine.engine import Engine, EngineConfig
from stoker.engine.event import AUTO, Depth
from stoker.engine.grammar.mask import GrammarMask
from stoker.engine.rules import Grammar
from stoker.engine.worker.client import LocalEngine
from stoker.errors import RequestError
from stoker.sampling.settings import Sampling
from stoker.server.errors import ApiError
from stoker.server.model import ServedModel
from stoker.server.prepare.structured import answer_mask, call_mask
from stoker.server.schemas.common import JsonSchemaFormat, ResponseFormat, StructuredOutputs
from stoker.speculate.choice import DraftChoice
from tests.server.running import Running, chat_body
from tests.support.extent import ALL

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "city": {"enum": ["Győr", "Pécs", "Budapest 🏛"]},
            "seats": {"type": "integer", "minimum": 1, "maximum": 99},
        },
        "required": ["name", "city", "seats"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "items": {
                "type": "array",
                "minItems": 1,
                "maxItems": 3,
                "items": {"$ref": "#/$defs/item"},
            },
            "paid": {"type": "boolean"},
        },
        "required": ["items", "paid"],
        "additionalProperties": False,
        "$defs": {
            "item": {
                "type": "object",
                "properties": {
                    "product": {"type": "string", "pattern": "^[a-z]{1,12}$"},
                    "price": {"anyOf": [{"type": "null"}, {"enum": [0.5, 1, 2]}]},
                },
                "required": ["product", "price"],
                "additionalProperties": False,
            }
        },
    },
    {"enum": ["yes", "no", None, 3]},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 5},
]
PROMPTS = 200 if ALL else 32


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel(EMBEDDED, ["demo"], 8192, {})


def wanted(schema: dict[str, Any]) -> ResponseFormat:
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat.model_validate({"schema": schema}))


def grammar(model: ServedModel, schema: dict[str, Any], thinking: bool = False) -> Grammar:
    found = answer_mask(model, wanted(schema), None, thinking)
    assert isinstance(found, Grammar)
    return found


def allowed(mask: GrammarMask, output: list[int]) -> Tensor:
    found = mask.allowed(output)
    assert found is not None
    return found


def test_answers_at_temperature_1_with_drafting_validate(shared: Running) -> None:
    """200 of them in `make test-all`; some think first, and every other streams."""
    questions = [text.partition("user\n")[2].partition("<|im_end|>")[0] for text in prompts()["JSON"]]

    def ask(number: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
        schema = SCHEMAS[number % len(SCHEMAS)]
        body = chat_body(
            questions[number % len(questions)][:300],
            temperature=1.0,
            seed=number,
            max_tokens=900,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            chat_template_kwargs={"enable_thinking": number % 8 == 0},
        )
        if number % 2:
            chunks = list(shared.stream("/v1/chat/completions", body))
            text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
            return text, schema, chunks[-1]["metrics"]
        whole = shared.post("/v1/chat/completions", body).json()
        return whole["choices"][0]["message"]["content"], schema, whole["metrics"]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(PROMPTS)))
    assert len(answers) == PROMPTS
    for text, schema, _ in answers:
        jsonschema.validate(json.loads(text), schema)
    assert len({text for text, _, _ in answers}) >= PROMPTS // 4
    drafted = sum(metrics["speculative_decoding"]["num_draft_tokens"] for _, _, metrics in answers)
    forced = sum(metrics["forced_tokens"] for _, _, metrics in answers)
    assert drafted > PROMPTS // 2
    assert forced > PROMPTS // 2
    shared.until_idle()


@pytest.mark.parametrize("thinking", [False, True])
def test_a_mask_answers_by_the_output_alone(model: ServedModel, thinking: bool) -> None:
    """Asked forwards, backwards and sideways, as drafts come and go, it says what a new one says."""
    rules = grammar(model, SCHEMAS[0], thinking)
    text = '{"name": "Anna", "city": "Győr", "seats": 2}'
    tokens = model.encode("I see.\n</think>\n\n" + text if thinking else text)
    used = GrammarMask(rules)
    other = model.encode('{"name": "Bé')
    order = [*range(len(tokens)), *range(len(tokens) - 1, -1, -1), 3, 9, 4, 1, len(tokens)]
    for place in order:
        if place == 9:
            allowed(used, tokens[: len(tokens) - len(model.encode(text))] + other)  # a draft that is thrown away
        output = tokens[:place]
        fresh = GrammarMask(rules)
        assert allowed(used, output).equal(allowed(fresh, output)), place
        assert list(used.forced(output)) == list(fresh.forced(output)), place
        if place < len(tokens):
            assert allowed(used, output)[tokens[place]], (place, model.decode(output))
    ends = list(rules.ends)
    assert allowed(used, tokens)[ends].all(), "a whole answer may end"
    assert not allowed(used, tokens[:-2])[ends].any(), "half an answer may not"
    assert not allowed(used, [])[ends].any(), "nor one in thought"


def test_a_mask_that_was_led_astray_answers_again(model: ServedModel) -> None:
    used = GrammarMask(grammar(model, SCHEMAS[0]))
    with pytest.raises(RequestError, match="grammar failed"):
        allowed(used, model.encode("no JSON"))
    assert allowed(used, []).any()


def test_the_same_tokens_with_and_without_drafting(model: ServedModel) -> None:
    """Exact inside drafted blocks: sampled under a grammar, every drafter gives what none gives."""
    loaded = load_model(EMBEDDED)
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    prompt = tokenizer.encode(prompts()["JSON"][0], add_special_tokens=False).ids
    rules = [grammar(model, schema) for schema in SCHEMAS]

    def answers(draft: str) -> list[list[int]]:
        choice = DraftChoice.parse(draft)
        config = EngineConfig(pages=64, slots=4, max_depth=choice.depth)
        backend, drafter = cpu_backend(loaded.model, config, choice, EMBEDDED)
        depth: Depth = AUTO if choice.adaptive else choice.depth
        with LocalEngine(Engine(config, backend, drafter, tokenizer)) as engine:
            streams = [
                engine.submit(
                    prompt,
                    Sampling(max_tokens=48, temperature=1.0, seed=seed, stop_ids=model.stop_ids),
                    depth,
                    mask=rules[seed % len(rules)],
                )
                for seed in range(4)
            ]
            return [[token for event in stream for token in event.tokens] for stream in streams]

    plain = answers("none")
    assert answers("lookup+dflash:8") == plain
    assert answers("auto") == plain


def test_calls_are_forced_in_the_form_of_the_template(model: ServedModel) -> None:
    schemas = {
        "find": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "kind": {"enum": ["a", "b"]},
                "count": {"type": "integer"},
                "deep": {"$ref": "#/$defs/deep"},
            },
            "required": ["text", "count"],
            "$defs": {"deep": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
        },
        "time": {},
    }
    one = "<tool_call>\n<function=time>\n</function>\n</tool_call>"
    whole = (
        "<tool_call>\n<function=find>\n<parameter=text>\nany\n\ntext </par\n</parameter>\n"
        "<parameter=kind>\nb\n</parameter>\n"
        '<parameter=count>\n3\n</parameter>\n<parameter=deep>\n{"x": 1}\n</parameter>\n</function>\n</tool_call>'
    )

    def allows(text: str, parallel: bool) -> bool:
        made = call_mask(model, schemas, parallel, thinking=False)
        assert isinstance(made, Grammar)
        mask, tokens = GrammarMask(made), model.encode(text)
        for place, token in enumerate(tokens):
            if not allowed(mask, tokens[:place])[token]:
                return False
        return bool(allowed(mask, tokens)[list(made.ends)].all())

    assert allows(one, parallel=False)
    assert allows(whole, parallel=False)
    assert allows(f"{one}\n{whole}", parallel=True)
    assert not allows(f"{one}\n{whole}", parallel=False)
    assert not allows("text " + one, parallel=True)
    assert not allows(whole.replace("\nb\n", "\nc\n"), parallel=False), "c is not among the choices"
    assert not allows(whole.replace("\n3\n", "\nthree\n"), parallel=False), "three is no integer"
    assert not allows(whole.replace("<parameter=text>", "<parameter=other>"), parallel=False)
    assert not allows(whole.replace("<function=find>", "<function=lose>"), parallel=False)


def test_other_ways_to_ask(model: ServedModel) -> None:
    def first(outputs: dict[str, Any], text: str) -> bool:
        made = answer_mask(model, None, StructuredOutputs.model_validate(outputs), thinking=False)
        assert isinstance(made, Grammar)
        mask, tokens = GrammarMask(made), model.encode(text)
        return all(bool(allowed(mask, tokens[:place])[token]) for place, token in enumerate(tokens))

    assert first({"choice": ["yes", "no"]}, "no")
    assert not first({"choice": ["yes", "no"]}, "maybe")
    assert first({"regex": "[a-c]+/[0-9]"}, "abc/7")
    assert not first({"regex": "[a-c]+"}, "d")
    assert first({"grammar": 'start: "a" | "b"'}, "b")
    assert first({"json": '{"type": "integer"}'}, "17")


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "file:///etc/passwd"},
        {"$ref": "http://127.0.0.1:9/x"},
        {"$ref": "#/nowhere"},
        {"type": "string", "pattern": "(" * 5000},
        {"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"},
        {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
        {"x": "y" * 300_000},
    ],
)
def test_hostile_schemas_are_refused_or_harmless(model: ServedModel, schema: dict[str, Any]) -> None:
    """Nothing is fetched, and what would take for ever to compile is refused instead."""
    opened: list[str] = []

    def audit(event: str, arguments: Any) -> None:
        if event in ("socket.connect", "subprocess.Popen") or (event == "open" and "passwd" in str(arguments[0])):
            opened.append(event)

    sys.addaudithook(audit)
    with suppress(ApiError):
        mask = answer_mask(model, wanted(schema), None, thinking=False)
        assert isinstance(mask, Grammar)
        GrammarMask(mask).allowed([])
    assert not opened
