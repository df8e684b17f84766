"""Suites of one's own: JSONL files of items, one file or a folder of them. docs/check.md shows how they are written."""

import re
from pathlib import Path
from typing import Any

import msgspec

from stoker.check.checkers import CHECKERS, RULES
from stoker.check.items import Item, Message, user
from stoker.check.language import WORDS
from stoker.errors import BenchError

SUFFIX = ".jsonl"


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """An item as it is written down: `prompt` for a single question, or `messages` for a conversation."""

    checker: str
    expect: Any = None
    prompt: str = ""
    messages: list[Message] = []
    id: str = ""
    suite: str = ""
    kind: str = ""
    tools: list[dict[str, Any]] = []
    max_tokens: int = 256
    language: str = ""


def is_file(suite: str) -> bool:
    """Whether --suite names a file or a folder rather than one of the built-in suites."""
    return suite.endswith(SUFFIX) or "/" in suite or Path(suite).exists()


def items(path: Path, most: int | None = None) -> list[Item]:
    """The items of a file or a folder, at most so many of each suite. Raises with file and line of what is wrong."""
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise BenchError(f"the folder {path} holds no {SUFFIX} file; write items as docs/check.md shows")
    found: dict[tuple[str, str], Item] = {}
    for file in files:
        for number, line in _lines(file):
            item = _item(line, file.stem, number, f"{file}, line {number}")
            if (item.suite, item.id) in found:
                raise BenchError(f"{file}, line {number}: suite {item.suite!r} has two items with the id {item.id!r}")
            found[item.suite, item.id] = item
    if not found:
        raise BenchError(f"{path} holds no items")
    # ids are unique within a suite; answers are kept by id alone
    named = [msgspec.structs.replace(item, id=f"{item.suite}/{item.id}") for item in found.values()]
    suites = dict.fromkeys(item.suite for item in named)
    return [item for suite in suites for item in [each for each in named if each.suite == suite][:most]]


def _lines(file: Path) -> list[tuple[int, bytes]]:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise BenchError(f"{file} cannot be read: {error.strerror}") from error
    return [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]


def _item(line: bytes, suite: str, number: int, where: str) -> Item:
    try:
        found = msgspec.json.decode(line, type=Line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"{where}: {error}") from error
    if bool(found.prompt) == bool(found.messages):
        raise BenchError(f"{where}: an item has either a prompt or messages")
    if found.max_tokens < 1:
        raise BenchError(f"{where}: max_tokens is {found.max_tokens}; an answer takes at least one")
    if found.language and found.language not in WORDS:
        raise BenchError(f"{where}: no language {found.language!r}; there are {', '.join(WORDS)}")
    if wrong := _problem(found):
        raise BenchError(f"{where}: {wrong}")
    return Item(
        id=found.id or str(number),
        messages=found.messages or user(found.prompt),
        checker=found.checker,
        expect=found.expect,
        suite=found.suite or suite,
        kind=found.kind,
        tools=found.tools,
        max_tokens=found.max_tokens,
        language=found.language,
    )


def _problem(line: Line) -> str:
    """What is wrong with `expect`, before a server has been asked anything."""
    checker, expect = line.checker, line.expect
    if checker not in CHECKERS:
        return f"no checker {checker!r}; there are {', '.join(CHECKERS)}"
    if any(not isinstance(message.get("role"), str) for message in line.messages):
        return "every message has a role"
    if not all(isinstance(tool.get("function"), dict) and tool["function"].get("name") for tool in line.tools):
        return 'a tool is written {"type": "function", "function": {"name": ..., "parameters": ...}}'
    sound, form = _FORMS[checker](expect)
    return "" if sound else f"{checker} expects {form}"


def _pattern(expect: Any) -> bool:
    try:
        re.compile(expect)
    except (re.error, TypeError):
        return False
    return True


def _call(expect: Any) -> bool:
    return (
        isinstance(expect, dict) and isinstance(expect.get("name"), str) and isinstance(expect.get("arguments"), dict)
    )


def _rule(expect: Any) -> bool:
    if not isinstance(expect, dict) or expect.get("rule") not in RULES:
        return False
    try:  # a rule without what it needs fails on any text
        RULES[expect["rule"]](expect, "text")
    except (KeyError, TypeError, ValueError):
        return False
    return True


def _cases(expect: Any) -> bool:
    return (
        isinstance(expect, dict)
        and isinstance(expect.get("function"), str)
        and isinstance(expect.get("cases"), list)
        and bool(expect["cases"])
        and all(isinstance(case, list) and len(case) == 2 and isinstance(case[0], list) for case in expect["cases"])
    )


def _all(expect: Any, sound: Any) -> bool:
    return isinstance(expect, list) and all(map(sound, expect))


def _text(expect: Any) -> bool:
    return isinstance(expect, str | int | float) and not isinstance(expect, bool) and expect != ""


_FORMS: dict[str, Any] = {
    "exact": lambda expect: (_text(expect), "a text"),
    "contains": lambda expect: (_text(expect) or (bool(expect) and _all(expect, _text)), "a text or a list of texts"),
    "regex": lambda expect: (_pattern(expect), "a regular expression"),
    "choice": lambda expect: (expect in list("ABCDEFGHIJ"), "a letter from A to J"),
    "number": lambda expect: (isinstance(expect, int | float) and not isinstance(expect, bool), "a number"),
    "language": lambda expect: (expect in WORDS, f"one of {', '.join(WORDS)}"),
    "json_fields": lambda expect: (isinstance(expect, dict | list) and bool(expect), "a JSON object or list"),
    "tool_calls": lambda expect: (_all(expect, _call), "a list of calls with a name and arguments"),
    "rules": lambda expect: (
        bool(expect) and _all(expect, _rule),
        f"a list of rules ({', '.join(RULES)}) with what each needs",
    ),
    "python": lambda expect: (_cases(expect), "a function and cases, [[arguments], result] each"),
}
