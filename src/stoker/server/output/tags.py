"""Finds where calls begin and values end in text, even if the model leaves out tags.

A value ends at its closing tag. If that is missing, it ends before text that cannot be part of it: the end of the
function together with that of the call, or the next parameter. The grammar of strict calls bars such text inside
values, so the parser and the grammar agree.
"""

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
THOUGHT_END = "</think>"
TOOL_NAME = re.compile(r"[\w.:/-]{1,256}")

SPACE = r"[ \t\r\n]{0,64}"
# valid in the syntax of Python and of Rust, because the grammar library bars the same text inside values
VALUE_ENDS = (
    PARAMETER_END,
    rf"{FUNCTION_END}{SPACE}<\/?tool_call>",
    rf"{CLOSE}{SPACE}{OPEN}",
    rf"{PARAMETER}[A-Za-z0-9_.-]{{1,64}}>",
)


def _prefix(tag: str) -> str:
    """A pattern for every prefix of `tag`, including the empty one and the whole tag."""
    return "".join(f"(?:{re.escape(letter)}" for letter in tag) + ")?" * len(tag)


_HALF_ENDS = (
    rf"<{_prefix(PARAMETER_END[1:])}",
    rf"<{_prefix(FUNCTION_END[1:-1])}",
    rf"{FUNCTION_END}{SPACE}(?:{_prefix(CLOSE)}|{_prefix(OPEN)})",
    rf"<{_prefix(CLOSE[1:-1])}",
    rf"{CLOSE}{SPACE}{_prefix(OPEN)}",
    rf"<{_prefix(PARAMETER[1:])}",
    rf"{PARAMETER}[A-Za-z0-9_.-]{{0,64}}",
)
_STRING = r'"(?:[^"\\\n]|\\.)*'  # of JSON, without its closing quote
_END = rf"(?P<end>{'|'.join(VALUE_ENDS)})"
_HALF = rf"(?P<half>\n?(?:{'|'.join(_HALF_ENDS)})\Z|\n\Z)"
_IN_TEXT = re.compile(rf"{_END}|{_HALF}")
_IN_JSON = re.compile(rf'(?P<string>{_STRING}")|{_END}|(?P<open>{_STRING}\\?\Z)|{_HALF}')


class End(NamedTuple):
    start: int
    stop: int  # after the closing tag; other tags are left in the text


class ValueEnds:
    """Finds the end of a value whose text arrives in pieces. A tag inside a JSON string does not end it."""

    def __init__(self, others: Collection[str] = (), nested: bool = False) -> None:
        """`others`: parameters that may follow; their tags end a value even in the middle of a line. `nested`: the
        value may be a list or an object."""
        self._others, self._nested = others, nested
        self._fresh = True  # the searched text begins with the value
        self._from = 0  # searched up to here

    def find(self, text: str) -> End | None:
        found = self._search(text)
        if not found or found.lastgroup != "end":
            return None
        closed = found.group() == PARAMETER_END
        return End(found.start(), found.end() if closed else found.start())

    def cut(self, text: str) -> int:
        """How much of a text without an end is certainly part of the value."""
        found = self._search(text)
        return len(text) if found is None else found.start()

    def consumed(self, count: int) -> None:
        """Records that the first characters of the text were consumed."""
        self._fresh = self._fresh and not count
        self._from = max(0, self._from - count)

    def _search(self, text: str) -> re.Match[str] | None:
        pattern = _IN_JSON if self._nested and text.lstrip()[:1] in ("[", "{") else _IN_TEXT
        position = self._from
        while found := pattern.search(text, position):
            if found.lastgroup in ("half", "open"):
                break
            if found.lastgroup == "end" and self._ends(text, found):
                return found
            position = found.end() if found.lastgroup == "string" else found.start() + 1
        self._from = found.start() if found else len(text)
        return found

    def _ends(self, text: str, found: re.Match[str]) -> bool:
        """Whether the match really begins another parameter, and does not just look like one."""
        if not found.group().startswith(PARAMETER):
            return True
        begins_line = text[found.start() - 1] == "\n" if found.start() else self._fresh
        return begins_line or found.group()[len(PARAMETER) : -1] in self._others


_NAME = r"[^<>\n]{0,256}"
_AFTER_NAME = rf"{_prefix(PARAMETER)}|{_prefix(FUNCTION_END)}"
_TAGS = re.compile(
    rf"(?P<open>{OPEN})|(?P<thought>{THOUGHT_END})"
    rf"|{FUNCTION}(?P<bare>{_NAME})>(?={SPACE}(?:{PARAMETER}|{FUNCTION_END}))"
    rf"|(?P<half>(?:<{_prefix(OPEN[1:-1])}|<{_prefix(THOUGHT_END[1:-1])})\Z)"
    rf"|(?P<halfbare>(?:<{_prefix(FUNCTION[1:])}|{FUNCTION}{_NAME}|{FUNCTION}{_NAME}>{SPACE}(?:{_AFTER_NAME}))\Z)"
)


class Tag(NamedTuple):
    start: int  # of the tag, or of text that must be held back
    tag: str | None


def next_tag(text: str, last: str, names: Collection[str] | None, thought: bool) -> Tag:
    """The first interruption of content: a call, with or without its opening tag, or a second end of a thought.

    `last` is the character before `text`. A function among `names` at the beginning of a line is a call without its
    opening tag if a parameter or its end follows. `names` is None if calls are not parsed. The end of a thought counts
    only if there was a thought (`thought`) and the tag is not quoted.
    """
    position = 0
    while found := _TAGS.search(text, position):
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
        position = start + 1
    return Tag(len(text), None)


_KEYS = ('"name"', '"arguments"', '"parameters"')
_THOUGHT_CALL = re.compile(rf"{OPEN}{SPACE}(?:{FUNCTION}(?P<name>{_NAME})>|\{{{SPACE}(?:{'|'.join(_KEYS)}){SPACE}:)")
_HALF_THOUGHT_CALL = re.compile(
    rf"(?:<{_prefix(OPEN[1:-1])}|{OPEN}{SPACE}(?:{_prefix(FUNCTION)}|{FUNCTION}{_NAME}"
    rf"|\{{{SPACE}(?:{'|'.join(map(_prefix, _KEYS))}){SPACE}))\Z"
)


def call_in_thought(text: str, names: Collection[str]) -> tuple[int, bool]:
    """Where a call, or text that may become one, begins inside a thought, and whether it is a call. A call ends the
    thought; a tag that is only mentioned is part of it."""
    for found in _THOUGHT_CALL.finditer(text):
        if found["name"] is None or found["name"].strip() in names:
            return found.start(), True
    half = _HALF_THOUGHT_CALL.search(text)
    return (half.start() if half else len(text)), False


def partial_tag(tags: Iterable[str], text: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of a tag, and so must be held back."""
    found = 0
    for tag in tags:
        for size in range(min(len(tag) - 1, len(text)), found, -1):
            if text.endswith(tag[:size]):
                found = size
                break
    return found
