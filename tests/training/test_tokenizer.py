"""Text survives the tokenizer, and the chat template follows the family's rules."""

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from training.chat import prompt_of, render
from training.config import TINY
from training.data import calls
from training.data.sample import assistant, tool, user
from training.data.sample import calls as asks
from training.tokenizer import MARKUP, SPECIAL, train

TEXTS = [
    "def f(x):\n    return x  # done\n\n\n",
    "Árvíztűrő tükörfúrógép, 12 345,60 Ft.",
    "  leading\tand trailing  ",
    "naïve café 日本語 🙂\r\n",
    '{"a": [1, 2.5, null]}',
]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Időjárás", "parameters": {}}},
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_single_ids_at_the_end_and_leave_room_for_the_mask(tokenizer: Tokenizer) -> None:
    size = TINY.trunk["vocab_size"]
    ids = [tokenizer.encode(token, add_special_tokens=False).ids for token in (*SPECIAL, *MARKUP)]
    assert ids == [[size - 16 + place] for place in range(len(ids))]
    assert TINY.trunk["eos_token_id"] == tokenizer.token_to_id("<|endoftext|>")
    assert TINY.drafter["dflash_config"]["mask_token_id"] == size - 1 > ids[-1][0]


def test_only_the_first_three_are_flagged_special(tokenizer: Tokenizer) -> None:
    added = tokenizer.get_added_tokens_decoder().values()
    assert {token.content for token in added if token.special} == set(SPECIAL)
    ids = tokenizer.encode("<|im_start|><think>x</think><|im_end|>", add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>x</think>"


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("20261115", add_special_tokens=False).ids) == 8


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="more text"):
        train(["a b c"], 512)


def test_transformers_reads_the_files_and_renders_alike(data: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(data / "tokenizer"))
    for index in range(20):
        chat = calls.make("train", index)
        for switch in ({}, {"enable_thinking": False}):
            found = theirs.apply_chat_template(
                chat.messages, tools=chat.tools, tokenize=False, add_generation_prompt=True, **switch
            )
            assert found == render(chat.messages, chat.tools, True, **switch)
    assert theirs.eos_token == "<|im_end|>"
    assert json.loads((data / "tokenizer" / "generation_config.json").read_text())["eos_token_id"] == [498, 496]


def test_no_system_prompt_is_made_up() -> None:
    assert render([user("Hi")], add_generation_prompt=True) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_thinking_can_be_disabled() -> None:
    assert prompt_of([user("Hi")]).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_tools_stand_in_the_system_block_before_its_text() -> None:
    text = render([{"role": "system", "content": "Be kind."}, user("Hi")], TOOLS)
    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert f"<tools>\n{json.dumps(TOOLS[0], ensure_ascii=False)}\n</tools>" in text
    assert text.index("</tools>") < text.index("<function=name>") < text.index("Be kind.<|im_end|>")
    assert text.count("<|im_start|>system") == 1


def test_calls_have_raw_strings_and_json_for_the_rest() -> None:
    arguments = {"city": "Győr", "days": 3, "tags": ["a", "b"], "deep": {"x": None}, "ok": True, "note": "two\nlines"}
    text = render([user("Hi"), asks(("get_weather", arguments))], TOOLS)
    assert (
        "<think>\n\n</think>\n\n<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nGyőr\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        '<parameter=tags>\n["a", "b"]\n</parameter>\n<parameter=deep>\n{"x": null}\n</parameter>\n'
        "<parameter=ok>\ntrue\n</parameter>\n<parameter=note>\ntwo\nlines\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>\n"
    ) in text


def test_tool_results_share_one_user_turn() -> None:
    text = render([user("Hi"), asks(("a", {}), ("b", {})), tool("1"), tool("2")])
    assert "</tool_call>\n<tool_call>" in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )


def test_reasoning_is_dropped_before_the_last_question_only() -> None:
    first = {**asks(("a", {})), "reasoning_content": "old thought"}
    second = {**asks(("b", {})), "reasoning_content": "new thought"}
    text = render([user("one"), first, tool("1"), assistant("done"), user("two"), second, tool("2")])
    assert "old thought" not in text
    assert "<|im_start|>assistant\n<tool_call>\n<function=a>" in text
    assert "<|im_start|>assistant\n<think>\nnew thought\n</think>\n\n<tool_call>\n<function=b>" in text


def test_reasoning_inside_the_content_is_recognised() -> None:
    text = render([user("one"), assistant("<think>\nhm\n</think>\n\nyes"), user("two")])
    assert "hm" not in text
    assert "<|im_start|>assistant\nyes<|im_end|>" in text


def test_a_tool_result_in_a_user_turn_is_no_question() -> None:
    """Reasoning stays while the user only hands over results."""
    thought = {**assistant("ok"), "reasoning_content": "kept"}
    assert "kept" in render([user("one"), thought, user("<tool_response>\n1\n</tool_response>")])


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "empty"),
        ([{"role": "system", "content": "x"}], "no user message"),
        ([user("x"), {"role": "system", "content": "y"}], "only come first"),
        ([user("x"), {"role": "critic", "content": "y"}], "Unknown role critic"),
        ([user("x"), asks(("a", "{}"))], "must be an object"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_rendered_is_refused(messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        render(messages)
