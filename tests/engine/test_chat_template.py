"""Chat templates print what transformers prints, and one that hangs, floods or is broken costs its own call alone."""

import json
import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from stoker import sandbox
from stoker.demo import EMBEDDED
from stoker.engine import chat_template
from stoker.engine.chat_template import RENDER_S, Refused, rendered
from stoker.engine.tokenizer import Tokenizer
from stoker.errors import TokenizerError
from tests.support.extent import ALL

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
QUESTION = {"role": "user", "content": "Which  file\nsets it? é 🙂 <b>"}
CALL = {"type": "function", "id": "1", "function": {"name": "read", "arguments": {"path": "a <b>.py", "n": [1, None]}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    QUESTION,
    {"role": "assistant", "content": "", "reasoning": "Let me see.", "tool_calls": [CALL]},
    {"role": "tool", "content": "PORT = 1\n"},
    {"role": "assistant", "content": "It is a.py.", "thinking": "Found."},
    {"role": "user", "content": "Sure?"},
]
TOOLS = [{"type": "function", "function": {"name": "read", "description": "Reads é", "parameters": {"x": "<&>"}}}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in FILES:
        shutil.copy(EMBEDDED / name, tmp_path / name)
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(EMBEDDED)


EACH, END = "{% for m in messages %}", "{% endfor %}"
SANE = {
    "the model's own": None,
    "blocks are trimmed": f"  {EACH}\n  {{{{ m.role }}}}\n  {END}\n end",
    "loop controls": EACH + "{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}" + END,
    "what is trained on": EACH + "{% generation %}\n{% set x = 1 %}{{ m.content }}{% endgeneration %}{{ x }}" + END,
    "JSON": "{{ messages | tojson(indent=2) }}{{ tools | tojson(ensure_ascii=true, sort_keys=true) }}",
    "JSON on one line": "{{ tools | tojson(separators=(',', ':')) }}{{ messages[2].tool_calls[0] | tojson }}",
    "names of a thought": EACH + "{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};" + END,
    "the order of keys": EACH + "{{ m | list }}" + END,
    "special tokens": "{{ eos_token }}{{ bos_token }}{{ pad_token }}{{ unk_token is defined }}",
    "what is always defined": "{{ tools is defined }}{{ documents is defined }}{{ documents }}",
    "options": "{{ enable_thinking }}{{ depth }}{{ enable_thinking is sameas false }}{{ add_generation_prompt }}",
    "a date": "{{ strftime_now('%d %B %Y') }}",
    "dictionaries": "{{ dict(a=1, b=[2]) }}{{ dict.fromkeys(['x', 'y'], 0) }}{{ dict([['self', 1]]) }}",
    "namespaces": (
        "{% set n = namespace(self=1, a='x') %}" + EACH + "{% set n.a = n.a ~ m.role %}" + END + "{{ n.a }}{{ n.self }}"
    ),
    "macros": "{% macro m(x, y=2) %}{{ x }}{{ y }}{% endmacro %}{{ m('a') }}{{ m('b', y=3) }}",
    "no escapes": "{{ messages[1].content }}{{ messages[1].content | e }}{{ messages[1].content | length }}",
}


@pytest.mark.parametrize("kind", SANE)
@pytest.mark.parametrize("begin", [True, False])
def test_a_conversation_is_what_transformers_makes_of_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, kind: str, begin: bool
) -> None:
    theirs = tokenizer._tokenizer
    if SANE[kind] is not None:
        monkeypatch.setattr(theirs, "chat_template", SANE[kind])
    for messages, tools in ((TALK, TOOLS), (TALK, None), (TALK[1:2], TOOLS)):
        options: dict[str, Any] = {"enable_thinking": False, "depth": 1.5}
        if kind == "what is always defined":
            options["documents"] = [{"title": "a", "text": "b"}]
        try:
            expected = theirs.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=begin, **options
            )
        except Exception as error:  # as jinja says it
            with pytest.raises(Refused, match=re.escape(str(error))):
                tokenizer.chat_text(messages, begin, tools=tools, **options)
        else:
            assert tokenizer.chat_text(messages, begin, tools=tools, **options) == expected


def test_of_several_templates_the_one_for_tools_is_taken_where_there_are_tools(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tokenizer._tokenizer
    monkeypatch.setattr(theirs, "chat_template", {"default": "plain", "tool_use": "with tools"})
    for tools, expected in ((None, "plain"), (TOOLS, "with tools")):
        assert tokenizer.chat_text([QUESTION], tools=tools) == expected
        assert theirs.apply_chat_template([QUESTION], tools=tools, tokenize=False) == expected
    monkeypatch.setattr(theirs, "chat_template", {"rag": "x"})
    with pytest.raises(TokenizerError, match="has no chat template"):
        tokenizer.chat_text([QUESTION])


ENDLESS = ["{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ 9 ** (9 ** 9) }}"]
HOSTILE = {
    "{{ 'x' * 10 ** 10 }}": "more than the 256 MiB",
    "{{ [0] * 10 ** 10 }}": "more than the 256 MiB",
    "{{ '%0999999999d' | format(1) }}": "more than the 256 MiB",
    "{{ '{:>9999999999}'.format(1) }}": "more than the 256 MiB",
    "{{ 'x'.center(10 ** 10) }}": "more than the 256 MiB",
    "{{ 'x\ny' | indent(10 ** 9) }}": "more than the 256 MiB",
    "{{ range(99999) | list | tojson(indent=99999) }}": "more than the 256 MiB",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}": (
        "more than the 256 MiB"
    ),
    "{{ 'x' * 10000000 }}": r"printed 10,000,0\d\d characters of this conversation, and at most 1,048,\d+ are taken",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}": "nested too deeply",
    "{{ range(10 ** 12) | list }}": "[Rr]ange too big",
    "{% for m in messages %}" * 50 + "{% endfor %}" * 50: "no template that jinja can read: too many",
    "{{ " + "(" * 100_000: "no template that jinja can read: it is nested too deeply",
    "{{ " + "messages + " * 100_000 + "messages }}": "nested too deeply",
    "a\n{% if %}": "chat_template.jinja is no template that jinja can read: line 2: Expected an expression",
    "{{ 1 | nosuch }}": "line 1: No filter named 'nosuch'. Correct it",
    "{{ raise_exception('Roles must alternate!') }}": "render this conversation: Roles must alternate!$",
    "{{ messages[0].author.name }}": "has no attribute 'author'",
}


@pytest.mark.parametrize("template", ENDLESS, ids=lambda template: template[:40])
def test_a_template_that_hangs_ends_in_a_sentence(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ALL:
        monkeypatch.setattr(chat_template, "RENDER_S", 1.0)
    began, variables = time.monotonic(), {"messages": [QUESTION]}
    with pytest.raises(TokenizerError, match=f"took more than the {chat_template.RENDER_S:g} s") as told:
        rendered(template, "chat_template.jinja", variables)
    assert time.monotonic() - began < RENDER_S + 5
    assert str(told.value).startswith("The chat template cannot render this conversation: ")
    monkeypatch.undo()
    assert rendered("{{ messages[0].content }}", "chat_template.jinja", variables) == QUESTION["content"]


@pytest.mark.parametrize("template", HOSTILE, ids=lambda template: template[:40])
def test_a_template_that_floods_or_is_broken_ends_in_a_sentence(template: str) -> None:
    began = time.monotonic()
    variables = {"messages": [QUESTION]}
    with pytest.raises(TokenizerError, match=HOSTILE[template]) as told:
        rendered(template + "{{ messages[0].content }}", "chat_template.jinja", variables)
    assert time.monotonic() - began < RENDER_S + 5
    assert str(told.value).startswith("The chat template cannot render this conversation: ")
    assert len(str(told.value)) < 400
    assert rendered("{{ messages[0].content }}", "chat_template.jinja", variables) == QUESTION["content"]


def test_long_conversations_are_no_flood(tokenizer: Tokenizer) -> None:
    text = "word, " * 500_000 + "🙂"
    printed = tokenizer.chat_text([{"role": "user", "content": text}], tools=TOOLS)
    assert text in printed


def test_a_killed_child_costs_one_conversation() -> None:
    variables = {"messages": [QUESTION]}
    ends: list[str] = []

    def render() -> None:
        try:
            rendered("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "x", variables)
        except TokenizerError as error:
            ends.append(str(error))

    thread = threading.Thread(target=render)
    thread.start()
    while not chat_template._children._busy:
        time.sleep(0.01)
    time.sleep(0.2)
    (child,) = chat_template._children._busy
    os.kill(child._process.pid, 9)
    thread.join()
    assert ends == [
        "The chat template cannot render this conversation: x ended the process that ran it. "
        "Shorten the conversation, or correct the template."
    ]
    assert rendered("{{ messages[0].role }}", "x", variables) == "user"


def test_templates_run_where_there_is_no_torch() -> None:
    """Starting a child must stay cheap: it loads jinja, and none of the large libraries."""
    assert sandbox.Sandbox().call(large_libraries, timeout=60) == []


def large_libraries() -> list[str]:
    import sys
    from importlib import import_module

    before = set(sys.modules)
    import_module("stoker.engine.chat_template")
    loaded = set(sys.modules) - before
    return sorted({"torch", "transformers", "tokenizers", "numpy"} & loaded)


# -- the files


@pytest.mark.parametrize("name", FILES[:3] + FILES[4:] + ("special_tokens_map.json", "added_tokens.json", "vocab.json"))
@pytest.mark.parametrize("kind", ["a named pipe", "a directory"])
def test_what_is_no_regular_file_is_refused_at_once(directory: Path, name: str, kind: str) -> None:
    path = directory / name
    path.unlink(missing_ok=True)
    if kind == "a directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(TokenizerError, match=rf"{name} cannot be read: it is {kind}, expected a file\."):
        Tokenizer(directory)


def test_a_template_beside_the_default_is_looked_at_too(directory: Path) -> None:
    (directory / "additional_chat_templates").mkdir()
    os.mkfifo(directory / "additional_chat_templates" / "tool_use.jinja")
    with pytest.raises(TokenizerError, match=r"tool_use\.jinja cannot be read: it is a named pipe"):
        Tokenizer(directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_file_of_gigabytes_is_not_read(directory: Path, name: str) -> None:
    with (directory / name).open("wb") as file:
        file.truncate(10 << 30)
    with pytest.raises(TokenizerError, match=rf"{re.escape(name)} cannot be read: it has 10,737,418,240 bytes"):
        Tokenizer(directory)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "garbage", r"tokenizer\.json is not valid JSON \(line 1, column 1"),
        ("tokenizer.json", "[" * 1_000_000, r"tokenizer\.json is not valid JSON .*nested more than"),
        ("tokenizer.json", '{"a":' * 200_000, r"tokenizer\.json is not valid JSON .*nested more than"),
        ("tokenizer.json", "[]", r"tokenizer\.json holds a JSON list, expected an object"),
        ("tokenizer.json", "{}", "the tokenizer in .* cannot be read"),
        ("tokenizer_config.json", "[" * 1_000_000, r"tokenizer_config\.json is not valid JSON .*nested more than"),
        ("tokenizer_config.json", "5", r"tokenizer_config\.json holds a JSON int, expected an object"),
        ("special_tokens_map.json", "[]", r"special_tokens_map\.json holds a JSON list"),
    ],
)
def test_of_broken_files_the_message_names_the_one_at_fault(
    directory: Path, name: str, content: str, words: str
) -> None:
    (directory / name).write_text(content)
    with pytest.raises(TokenizerError, match=words) as told:
        Tokenizer(directory)
    assert len(str(told.value)) < 400


def test_a_template_that_is_no_text_is_named(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": 5}))
    with pytest.raises(TokenizerError, match="the chat template is of type int, expected text"):
        Tokenizer(directory).chat_text([QUESTION])
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "{% if %}"}))
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is no template that jinja can read"):
        Tokenizer(directory).chat_text([QUESTION])
