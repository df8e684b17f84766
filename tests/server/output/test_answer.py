"""However an answer is cut into pieces, its reasoning, text and calls are those of the whole."""

import json
import random
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer

from stoker.demo import EMBEDDED
from stoker.engine.text import TextStream
from stoker.server.output.answer import AnswerParser, ReasoningSplitter
from stoker.server.output.pieces import Call, CallArguments, Message, Piece

TOOLS = {
    "time": {"type": "object", "properties": {}},
    "get_train": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "seats": {"type": "integer"},
            "return": {"type": "boolean"},
            "via": {"type": "array", "items": {"type": "string"}},
            "when": {"$ref": "#/$defs/date"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"date": {"type": "object"}},
    },
}
CALL = (
    "<tool_call>\n<function=get_train>\n<parameter=city>\nGyőr\n</parameter>\n<parameter=seats>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
JSON_CALL = '<tool_call>\n{"name": "get_train", "arguments": {"city": "Győr }", "seats": 2}}\n</tool_call>'
# short enough for every way to cut them in two, and for one character at a time
SHORT = {
    "thought": "Röviden. 🙂</think>\n\nJó napot!",
    "thought only": "hm, still </thin",
    "opened by the model": "<think>\na\n</think>\n\nb",
    "no thought": " <thing> a < b",
    "call": CALL,
    "json call": JSON_CALL,
    "text, call, text": f"Nézem. 👀\n\n{CALL}\nKész.",
    "two calls": f"{CALL}\n{JSON_CALL}",
    "call in a thought": f"I will look.\n{CALL}",
    "no arguments": "<tool_call>\n<function=time>\n</function>\n</tool_call>",
    "lines and quotes": (
        '<tool_call>\n<function=get_train>\n<parameter=city>\n\n"a\\b"\n\n\tc</par\n</parameter>\n</function>'
    ),
    "types": (
        "<tool_call><function=get_train><parameter=return>True</parameter><parameter=via>\n"
        '["Tata", "Ács"]\n</parameter><parameter=when>{"day": 3}</parameter>'
        "<parameter=note>\nnull\n</parameter></function></tool_call>"
    ),
    "no value of its type": (
        "<tool_call><function=get_train><parameter=seats>\nkettő\n</parameter></function></tool_call>"
    ),
    "arguments first": '<tool_call>{"arguments": {"city": "x"}, "name": "get_train"}</tool_call>',
    "not a call": "<tool_call> is how a call begins",
    "not a function": "<tool_call>\n<function=a\nb>x",
    "not JSON": '<tool_call>\n{"name": tru, "arguments": {}}\n</tool_call>\nx',
    "unclosed": "<tool_call>\n<function=get_train>\n<parameter=city>\nGyőr",
    "no opening tag": CALL.removeprefix("<tool_call>\n"),
    "text, no opening tag": "Nézem.\n" + CALL.removeprefix("<tool_call>\n"),
    "no opening tag, then one": CALL.removeprefix("<tool_call>\n") + "\n" + CALL,
    "bare, but unknown": "\n<function=other>\n<parameter=a>\n1\n</parameter>\n</function>",
    "bare, but in a sentence": "Write <function=time>\n</function> to call it",
    "bare, but no call": "\n<function=time> is the name",
    "no end of a parameter": CALL.replace("</parameter>\n</function>", "</function>"),
    "no end before the next": CALL.replace("</parameter>\n<parameter", "<parameter"),
    "no end before the next, one line": CALL.replace("\n</parameter>\n<parameter=seats>\n", "<parameter=seats>"),
    "no end before an unknown": CALL.replace("</parameter>\n<parameter=seats", "<parameter=zip"),
    "no end but the call's": CALL.replace("</parameter>\n</function>\n", ""),
    "no end of the function": CALL.replace("</function>\n", ""),
    "no end of the call": CALL.removesuffix("\n</tool_call>") + "\n" + CALL,
    "no end at all": CALL.replace("</parameter>\n</function>\n</tool_call>", "") + CALL.replace("Győr", "Pécs"),
    "mention in a thought": "I write <tool_call> and <tool_call>\n<function=x> there.\n</think>\n\nJó.",
    "json call in a thought": f"Now.\n{JSON_CALL}",
    "thought ends twice": "a</think>\n\nb</think>c, `</think>` d",
    "empty call": "a\n<tool_call>\n</tool_call>\nb",
    "unknown tool": "<tool_call>\n<function=other>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
    "markup in a value": CALL.replace(
        "Győr", "<function=time>\n</function>\n<b>é</b> </parameter <parameter=\n<tool_call>"
    ),
    "tag in a JSON string": (
        '<tool_call><function=get_train><parameter=via>["</parameter>", "\\"<parameter=city>"]</parameter></function>'
    ),
    "broken JSON string": '<tool_call><function=get_train><parameter=via>\n["a\n</parameter></function></tool_call>x',
    "given twice": CALL.replace("</function>", "<parameter=city>\nPécs\n</parameter>\n</function>"),
    "white space": (
        "<tool_call>  <function= get_train >\n\n <parameter= city >Győr</parameter>\n\n</function>  </tool_call>"
    ),
    "half a tag at the end": "<tool_call>\n<function=get_train>\n<parameter=city>\nGyőr\n</param",
    "half a call at the end": "Jó.\n<tool_call>\n<func",
    "large numbers": (
        "<tool_call><function=get_train><parameter=seats>12345678901234567890</parameter><parameter=when>"
        '{"t": 1e999, "s": "\\ud800"}</parameter></function></tool_call>'
    ),
    "stray text": "<tool_call><function=time>\nno parameters\n</function></tool_call>",
    "thought opened once more": "<think>\na\n</think>\n\nb",
    "tag of a thought inside": "a <think> b</think>c",
    "empty thought": "<think>\n\n</think>\n\nb",
    "no end of the name": "<tool_call>\n<function=time\n</function>\n</tool_call>\n" + JSON_CALL,
    "name of a template": "<tool_call>\n<function={{ f.name }}>\n</function>\n</tool_call>\n" + JSON_CALL,
    "name that is none in JSON": '<tool_call>{"name": "{{ name }}", "arguments": {}}</tool_call>',
    "opened twice": f"Jó.\n<tool_call>\n{CALL}",
    "closed twice": f"{CALL}\n</tool_call>\nKész.",
    "opened twice, but no call": "<tool_call><tool_call> is a tag",
    "list of calls": '<tool_call>\n[{"name": "time", "arguments": {}}]\n</tool_call>',
    "arguments in a string": '<tool_call>{"name": "get_train", "arguments": "{\\"city\\": \\"x\\"}"}</tool_call>',
    "text that looks like another type": (
        "<tool_call><function=get_train><parameter=city>null</parameter><parameter=note>42</parameter></function>"
    ),
    "empty text": "<tool_call><function=get_train><parameter=city></parameter><parameter=note>\n</parameter>",
    "code": CALL.replace("Győr", "if a < b && c:\n\tsay('é \\n \"q\"')\n"),
    "Python's words": (
        "<tool_call><function=get_train><parameter=return>\nFALSE\n</parameter><parameter=note>None</parameter>"
        """<parameter=via>['it\\'s', "a'b", 'say "x"', True, None]</parameter>"""
        "<parameter=when>{'day': 3, 'True': 'None'}</parameter></function></tool_call>"
    ),
    "encoded twice": (
        '<tool_call><function=get_train><parameter=via>\n"[\\"a\\"]"\n</parameter><parameter=when>"{\'day\': 3}"'
        '</parameter><parameter=seats>"2"</parameter></function></tool_call>'
    ),
    "nearly Python": "<tool_call><function=get_train><parameter=via>['a', b'c', 'd]</parameter></function></tool_call>",
}


def message_of(pieces: Iterable[Piece]) -> Message:
    message = Message()
    for piece in pieces:
        message.add(piece)
    return message


def parse(pieces: Iterable[str], thinking: bool = False, complete: bool = True) -> Message:
    parser = AnswerParser(thinking, TOOLS)
    found: list[Piece] = []
    for text in pieces:
        found += parser.push(text)
    return message_of(found + parser.finish(complete))


def cut(text: str, places: Iterable[int]) -> list[str]:
    return [text[start:stop] for start, stop in pairwise([0, *sorted(places), len(text)])]


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("thinking", [True, False])
def test_every_way_to_cut_a_short_answer_in_up_to_three(name: str, thinking: bool) -> None:
    """All pairs of places, and every character by itself; of every beginning of it too, ended and cut off."""
    text = SHORT[name]
    whole = parse([text], thinking)
    for first in range(len(text) + 1):
        # of the longer ones all cuts in two, and of those in three the pieces that a tag fits in
        for second in range(first, len(text) + 1 if len(text) < 70 else min(len(text), first + 14) + 1):
            assert parse(cut(text, (first, second)), thinking) == whole, (text[:first], text[first:second])
    for stop in range(len(text) + 1):
        for complete in (True, False):
            expected = parse([text[:stop]], thinking, complete)
            assert parse(text[:stop], thinking, complete) == expected, text[:stop]


@pytest.mark.parametrize("text", ["ő</think> 🙂", "<think>é", "🙂<tool_call>", "<tool_call>{é", "a</think><to"])
@pytest.mark.parametrize("thinking", [True, False])
def test_every_way_there_is_to_cut_a_tag(text: str, thinking: bool) -> None:
    """All 2ⁿ⁻¹ of them, not only those in three."""
    whole = parse([text], thinking)
    for chosen in range(1 << (len(text) - 1)):
        pieces = cut(text, [place + 1 for place in range(len(text) - 1) if chosen >> place & 1])
        assert parse(pieces, thinking) == whole, pieces


@cache
def tokenizer() -> Any:
    return Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))


LONG = "Gondolkodom, kell-e vonat. 🚆\n</think>\n\nMegnézem a menetrendet:\n\n" + "\n".join(
    [
        CALL,
        SHORT["types"],
        JSON_CALL,
        CALL.replace("Győr", "Székesfehérvár \\ \"idézet\" 👩‍👩‍👧\n\n    kód = {'a': 1}\n</par" * 6),
        SHORT["no value of its type"],
    ]
)


@pytest.mark.parametrize("seed", range(40))
def test_random_cuts_of_a_long_answer(seed: int) -> None:
    chosen = random.Random(seed)
    count = chosen.choice([1, 2, 5, 20, 100, len(LONG) // 2])
    assert parse(cut(LONG, chosen.sample(range(len(LONG)), count)), thinking=True) == parse([LONG], thinking=True)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("stop", [None, "kód", "</function>", "👀 és", "Kész"])
def test_random_steps_of_several_tokens_with_a_stop_string(seed: int, stop: str | None) -> None:
    """The way of the server: tokens of a step to text, stop strings cut out, then parsed. Steps do not show."""
    text = LONG + "\n👀 és Kész."
    tokens = tokenizer().encode(text, add_special_tokens=False).ids
    chosen = random.Random(seed)

    def through(steps: list[list[int]]) -> tuple[Message, str | None, int]:
        stream, parser = TextStream(tokenizer(), (stop,) if stop else ()), AnswerParser(True, TOOLS)
        pieces: list[Piece] = []
        used = 0
        for step in steps:
            for token in step:
                if stream.stopped is None:
                    used += 1
                    pieces += parser.push(stream.push(token))
        pieces += parser.push(stream.flush())
        return message_of(pieces + parser.finish()), stream.stopped, used

    places = sorted(chosen.sample(range(1, len(tokens)), min(len(tokens) - 1, chosen.choice([3, 30, 150]))))
    steps = [tokens[start:end] for start, end in pairwise([0, *places, len(tokens)])]
    found = through(steps)
    assert found == through([[token] for token in tokens])
    assert found[1] == (stop if stop and stop in text else None)
    expected = text if not stop or stop not in text else text[: text.index(stop)]
    assert found[0] == parse([expected], thinking=True)


def test_what_the_short_answers_mean() -> None:
    def said(name: str, thinking: bool = False) -> Message:
        return parse([SHORT[name]], thinking)

    train = Call("get_train", '{"city": "Győr", "seats": 2}')
    assert said("thought", thinking=True) == Message("Röviden. 🙂", "Jó napot!", [])
    assert said("opened by the model") == Message("a", "b", [])
    assert said("no thought") == Message("", " <thing> a < b", [])
    assert said("call") == Message("", "", [train])
    assert said("json call").calls == [Call("get_train", '{"city": "Győr }", "seats": 2}')]
    assert said("text, call, text") == Message("", "Nézem. 👀\nKész.", [train])
    assert [call.name for call in said("two calls").calls or []] == ["get_train", "get_train"]
    assert said("call in a thought", thinking=True) == Message("I will look.", "", [train])
    assert said("no arguments").calls == [Call("time", "{}")]
    assert json.loads((said("lines and quotes").calls or [])[0].arguments) == {"city": '\n"a\\b"\n\n\tc</par'}
    assert json.loads((said("types").calls or [])[0].arguments) == {
        "return": True,
        "via": ["Tata", "Ács"],
        "when": {"day": 3},
        "note": None,
    }
    assert json.loads((said("no value of its type").calls or [])[0].arguments) == {"seats": "kettő"}
    assert said("arguments first").calls == [Call("get_train", '{"city": "x"}')]
    for name in ("not a call", "not a function", "not JSON"):
        assert said(name) == Message("", SHORT[name], [])
    assert said("unclosed").calls == [Call("get_train", '{"city": "Győr"}')]
    assert parse([SHORT["unclosed"]], complete=False).calls == [Call("get_train", '{"city": "Győr')]
    assert said("stray text").calls == [Call("time", "{}")]


def test_what_answers_with_faults_mean() -> None:
    """The faults that the suites of vLLM, SGLang and llama.cpp know, and some of our own."""

    def said(name: str, thinking: bool = False) -> Message:
        return parse([SHORT[name]], thinking)

    def arguments(name: str) -> list[Any]:
        return [json.loads(call.arguments) for call in said(name).calls or []]

    train = {"city": "Győr", "seats": 2}
    for name in (
        *("no opening tag", "no end of a parameter", "no end before the next", "no end before the next, one line"),
        *("no end but the call's", "no end of the function", "given twice"),
    ):
        assert arguments(name) == [train], name
        assert said(name).content == "", name
    assert said("text, no opening tag").content == "Nézem."
    assert arguments("text, no opening tag") == [train]
    assert arguments("no opening tag, then one") == [train, train]
    for name in ("bare, but unknown", "bare, but in a sentence", "bare, but no call"):
        assert said(name) == Message("", SHORT[name], []), name
    assert arguments("no end before an unknown") == [{"city": "Győr", "zip": "2"}]
    assert arguments("no end of the call") == [train, train]
    assert said("mention in a thought", True) == Message(
        "I write <tool_call> and <tool_call>\n<function=x> there.", "Jó.", []
    )
    assert said("json call in a thought", True).reasoning == "Now."
    assert [call.name for call in said("json call in a thought", True).calls or []] == ["get_train"]
    assert said("thought ends twice", True) == Message("a", "bc, `</think>` d", [])
    assert said("empty call") == Message("", "a\nb", [])
    assert said("unknown tool").calls == [Call("other", '{"n": "1"}')]
    assert arguments("markup in a value")[0]["city"].endswith("</parameter <parameter=\n<tool_call>")
    assert arguments("tag in a JSON string") == [{"via": ["</parameter>", '"<parameter=city>']}]
    assert arguments("broken JSON string") == [{"via": '["a'}]
    assert arguments("white space") == [{"city": "Győr"}]
    assert arguments("half a tag at the end") == [{"city": "Győr"}]
    assert said("half a call at the end") == Message("", "Jó.", [])
    for name in ("thought opened once more", "empty thought"):
        assert said(name, True) == said(name), name
    assert said("thought opened once more", True) == Message("a", "b", [])
    assert said("empty thought", True) == Message("", "b", [])
    assert said("tag of a thought inside", True) == Message("a <think> b", "c", [])
    for name in ("no end of the name", "name of a template"):
        assert said(name).content == SHORT[name].removesuffix(JSON_CALL).strip(), name
        assert [call.name for call in said(name).calls or []] == ["get_train"], name
    for name in ("name that is none in JSON", "opened twice, but no call", "list of calls"):
        assert said(name) == Message("", SHORT[name], []), name
    assert (said("opened twice").content, arguments("opened twice")) == ("Jó.", [train])
    assert (said("closed twice").content, arguments("closed twice")) == ("Kész.", [train])
    assert arguments("arguments in a string") == [{"city": "x"}]
    assert arguments("text that looks like another type") == [{"city": "null", "note": "42"}]
    assert arguments("empty text") == [{"city": "", "note": ""}]
    assert arguments("code")[0]["city"] == "if a < b && c:\n\tsay('é \\n \"q\"')\n"
    assert arguments("Python's words") == [
        {
            "return": False,
            "note": None,
            "via": ["it's", "a'b", 'say "x"', True, None],
            "when": {"day": 3, "True": "None"},
        }
    ]
    assert arguments("encoded twice") == [{"via": ["a"], "when": {"day": 3}, "seats": 2}]
    assert arguments("nearly Python") == [{"via": "['a', b'c', 'd]"}]
    assert arguments("large numbers")[0]["seats"] == 12345678901234567890
    assert '"t": 1e999' in (said("large numbers").calls or [])[0].arguments


def test_a_call_that_is_cut_off_is_never_closed() -> None:
    """With finish reason length the arguments stay open, so that no client takes half of them for all."""
    for stop in range(CALL.index("<function") + len("<function=get_train>"), CALL.index("</function>")):
        for call in parse([CALL[:stop]], complete=False).calls or []:
            with pytest.raises(json.JSONDecodeError):
                json.loads(call.arguments)


def test_a_string_argument_streams_and_is_valid_json_at_every_stop() -> None:
    parser = AnswerParser(False, TOOLS)
    text = CALL.replace("Győr", 'ű"\\\n' * 50)
    arguments, lengths = "", set()
    for letter in text:
        for piece in parser.push(letter):
            if isinstance(piece, CallArguments):
                arguments += piece.text
        lengths.add(len(arguments))
        for closing in ("", "}", '"}', "{}"):  # always the beginning of one object
            try:
                json.loads(arguments + closing)
                break
            except ValueError:
                continue
        else:
            raise AssertionError(f"{arguments[-20:]!r} is no beginning of JSON")
    assert len(lengths) > 100, "the argument came in one piece"
    assert json.loads(arguments) == {"city": 'ű"\\\n' * 50, "seats": 2}


def test_without_tools_a_call_is_text() -> None:
    parser = AnswerParser(False, None)
    assert message_of(parser.push(CALL) + parser.finish()) == Message("", CALL, [])


@pytest.mark.parametrize(
    ("thinking", "text", "thought", "answer"),
    [
        (True, "a < b\n\n c\n</think>\n\nx\n", "a < b\n\n c", "x\n"),
        (True, "never closed </thin", "never closed </thin", ""),
        (False, "\n<think> a</think>x</think>", "a", "x</think>"),
        (False, "<thin", "", "<thin"),
        (False, "<thing> <think>", "", "<thing> <think>"),
        (False, "plain", "", "plain"),
        (False, "", "", ""),
    ],
)
def test_thoughts_are_told_from_answers_however_the_text_is_cut(
    thinking: bool, text: str, thought: str, answer: str
) -> None:
    for size in range(1, len(text) + 1):
        splitter = ReasoningSplitter(thinking)
        pairs = [splitter.push(piece) for piece in cut(text, range(size, len(text), size))]
        pairs.append(splitter.flush())
        assert tuple("".join(side) for side in zip(*pairs, strict=True)) == (thought, answer)
