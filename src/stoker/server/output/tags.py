"""Where calls begin and values end in text, tags that models forget included.

A value ends at its closing tag. Where that is missing it ends before what cannot be part of it: the end of the function
together with that of the call, or the next parameter. The grammar of strict calls bars such text inside values, so both
sides agree about it.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
THOUGHT_END = "</think>"
TOOL_NAME = re.compile(r"[\w.:/-]{1,256}")

SPACE = r"[ \t\r\n]{0,64}"
# in the syntax of Python and of Rust, whose grammar library bars the same inside values
VALUE_ENDS = (
    PARAMETER_END,
    rf"{FUNCTION_END}{SPACE}<\/?tool_call>",
    rf"{CLOSE}{SPACE}{OPEN}",
    rf"{PARAMETER}[A-Za-z0-9_.-]{{1,64}}>",
)


def _beginning(tag: str) -> str:
    """A pattern for every beginning of `tag`, the empty one and all of it included."""
    return "".join(f"(?:{re.escape(letter)}" for letter in tag) + ")?" * len(tag)


_HALF_ENDS = (
    rf"<{_beginning(PARAMETER_END[1:])}",
    rf"<{_beginning(FUNCTION_END[1:-1])}",
    rf"{FUNCTION_END}{SPACE}(?:{_beginning(CLOSE)}|{_beginning(OPEN)})",
    rf"<{_beginning(CLOSE[1:-1])}",
    rf"{CLOSE}{SPACE}{_beginning(OPEN)}",
    rf"<{_beginning(PARAMETER[1:])}",
    rf"{PARAMETER}[A-Za-z0-9_.-]{{0,64}}",
)
_STRING = r'"(?:[^"\\\n]|\\.)*'  # of JSON, without its closing quote
_END = rf"(?P<end>{'|'.join(VALUE_ENDS)})"
_HALF = rf"(?P<half>\n?(?:{'|'.join(_HALF_ENDS)})\Z|\n\Z)"
_IN_TEXT = re.compile(rf"{_END}|{_HALF}")
_IN_JSON = re.compile(rf'(?P<string>{_STRING}")|{_END}|(?P<open>{_STRING}\\?\Z)|{_HALF}')


class End(NamedTuple):
    start: int
    stop: int  # behind the closing tag; other tags are left for whoever comes next


class ValueEnds:
    """Finds the end of one value whose text comes in pieces. A tag inside a string of JSON is no end."""

    def __init__(self, others: Collection[str] = (), nested: bool = False) -> None:
        """`others`: parameters that may follow, which also end a value in the middle of a line. `nested`: the value
        may be a list or an object."""
        self._others, self._nested = others, nested
        self._fresh = True  # the text asked about begins with the value
        self._from = 0  # searched up to here

    def find(self, text: str) -> End | None:
        found = self._search(text)
        if not found or found.lastgroup != "end":
            return None
        closed = found.group() == PARAMETER_END
        return End(found.start(), found.end() if closed else found.start())

    def cut(self, text: str) -> int:
        """How much of a text without an end is surely part of the value."""
        found = self._search(text)
        return len(text) if found is None else found.start()

    def passed(self, count: int) -> None:
        """The first characters of the text have been taken away."""
        self._fresh = self._fresh and not count
        self._from = max(0, self._from - count)

    def _search(self, text: str) -> re.Match[str] | None:
        pattern = _IN_JSON if self._nested and text.lstrip()[:1] in ("[", "{") else _IN_TEXT
        place = self._from
        while found := pattern.search(text, place):
            if found.lastgroup in ("half", "open"):
                break
            if found.lastgroup == "end" and self._ends(text, found):
                return found
            place = found.end() if found.lastgroup == "string" else found.start() + 1
        self._from = found.start() if found else len(text)
        return found

    def _ends(self, text: str, found: re.Match[str]) -> bool:
        """Whether another parameter begins, and not merely text that looks so."""
        if not found.group().startswith(PARAMETER):
            return True
        begins_line = text[found.start() - 1] == "\n" if found.start() else self._fresh
        return begins_line or found.group()[len(PARAMETER) : -1] in self._others


_NAME = r"[^<>\n]{0,256}"
_AFTER_NAME = rf"{_beginning(PARAMETER)}|{_beginning(FUNCTION_END)}"
_TAGS = re.compile(
    rf"(?P<open>{OPEN})|(?P<thought>{THOUGHT_END})"
    rf"|{FUNCTION}(?P<bare>{_NAME})>(?={SPACE}(?:{PARAMETER}|{FUNCTION_END}))"
    rf"|(?P<half>(?:<{_beginning(OPEN[1:-1])}|<{_beginning(THOUGHT_END[1:-1])})\Z)"
    rf"|(?P<halfbare>(?:<{_beginning(FUNCTION[1:])}|{FUNCTION}{_NAME}|{FUNCTION}{_NAME}>{SPACE}(?:{_AFTER_NAME}))\Z)"
)


class Tag(NamedTuple):
    start: int  # of it, or of text that must be held back
    tag: str | None


def next_tag(text: str, last: str, names: Collection[str] | None, thought: bool) -> Tag:
    """What interrupts content first: a call, with its opening tag or without, or a thought that ends once more.

    `last` is the character before `text`. A function among `names` at the beginning of a line is a call without its
    opening tag, if a parameter or its end follows; None: there are no calls. The end of a thought counts after one, and
    not in quotes.
    """
    place = 0
    while found := _TAGS.search(text, place):
        kind, start = found.lastgroup, found.start()
        before = text[start - 1] if start else last
        if kind == "open" and names is not None:
            return Tag(start, OPEN)
        if kind == "thought" and thought and before not in "`'\"":
            return Tag(start, THOUGHT_END)
        if kind == "bare" and names and before == "\n" and found["bare"].strip() in names:
            return Tag(start, FUNCTION)
        if kind == "half" or (kind == "halfbare" and before == "\n"):
            return Tag(start, None)
        place = start + 1
    return Tag(len(text), None)


_KEYS = ('"name"', '"arguments"', '"parameters"')
_THOUGHT_CALL = re.compile(rf"{OPEN}{SPACE}(?:{FUNCTION}(?P<name>{_NAME})>|\{{{SPACE}(?:{'|'.join(_KEYS)}){SPACE}:)")
_HALF_THOUGHT_CALL = re.compile(
    rf"(?:<{_beginning(OPEN[1:-1])}|{OPEN}{SPACE}(?:{_beginning(FUNCTION)}|{FUNCTION}{_NAME}"
    rf"|\{{{SPACE}(?:{'|'.join(map(_beginning, _KEYS))}){SPACE}))\Z"
)


def call_in_thought(text: str, names: Collection[str]) -> tuple[int, bool]:
    """Where a call begins inside a thought, which ends it, or text that could become one; and whether it is one.
    A tag that is only mentioned is part of the thought."""
    for found in _THOUGHT_CALL.finditer(text):
        if found["name"] is None or found["name"].strip() in names:
            return found.start(), True
    half = _HALF_THOUGHT_CALL.search(text)
    return (half.start() if half else len(text)), False
