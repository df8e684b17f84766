"""Parses tool calls in text that arrives in pieces, in both formats of this model family:

    <tool_call>                              <tool_call>
    <function=NAME>                          {"name": NAME, "arguments": {...}}
    <parameter=KEY>                          </tool_call>
    VALUE
    </parameter>
    </function>
    </tool_call>

A string parameter streams as it is written, any other is emitted when it is complete, so that the output so far is
always a prefix of one JSON object. Decisions depend on the text alone, never on where it was cut: text that may still
become a tag is held back. Text that turns out not to be a call is content, including its tag. Missing tags are inferred
(see `tags`). If a parameter is given twice, the first counts.
"""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from stoker.server.output.pieces import CallArguments, CallStart, Content, Piece
from stoker.server.output.tags import (
    CLOSE,
    FUNCTION,
    FUNCTION_END,
    OPEN,
    PARAMETER,
    THOUGHT_END,
    TOOL_NAME,
    ValueEnds,
    next_tag,
    partial_tag,
)
from stoker.server.output.tool_json import Incomplete, Malformed, ObjectEnd, call_head
from stoker.server.output.tool_schemas import parameter_types
from stoker.server.output.values import STRING, escape, to_json

LONGEST_NAME = 256


class ToolCallParser:
    def __init__(self, tools: Mapping[str, Any] | None, tagged: Collection[str] = ()) -> None:
        """`tools` are parameter schemas by name, or None if calls are not parsed. A call of an unknown tool passes
        with strings as values. Tools in `tagged` are called after an opening tag only, where their grammar begins."""
        self.thought = False  # there was a thought before: a second end tag is dropped
        self._tools = tools or {}
        self._untagged = None if tools is None else set(tools) - set(tagged)
        self._last = "\n"  # last character of the content so far
        self._held = ""
        self._out: list[Piece] = []
        self._state: Callable[[], bool] = self._content
        self._raw = ""  # text of the current call, in case it is not one
        self._index = -1  # of the current call
        self._name = ""
        self._given: set[str] = set()  # parameters of the current call so far
        self._key = ""
        self._types: frozenset[str] = frozenset()
        self._ends = ValueEnds()
        self._fresh = False  # the current value is still empty
        self._duplicate = False  # the current value is of a parameter that was given before
        self._end = ObjectEnd()
        self._emitted_content = False  # content has been emitted

    def push(self, text: str) -> list[Piece]:
        self._held += text
        return self._run()

    def finish(self, complete: bool) -> list[Piece]:
        """The pieces held back. `complete`: the model ended the answer itself, so an open call is closed. A call that
        was cut off stays open, as the finish reason says."""
        self._run()
        state, held = self._state, self._held
        self._held = ""
        if state == self._json_head:
            self._emit_content(self._raw + held)
        elif state in (self._content, self._closed):
            self._emit_content(held if held.strip() or self._index < 0 else "")
        elif complete and state not in (self._opened, self._function_name, self._after, *self._json_states):
            if state == self._string:
                self._arguments('"')
            elif state == self._value:
                self._member(held[: self._ends.cut(held)])
            self._close_arguments()
        out, self._out = self._out, []
        return out

    def _run(self) -> list[Piece]:
        while self._state():
            pass
        out, self._out = self._out, []
        return out

    # -- states: each consumes what it can of the held text and returns whether parsing can continue

    def _content(self) -> bool:
        found = next_tag(self._held, self._last, self._untagged, self.thought)
        # white space before a call is dropped, so it waits for what follows it
        cut = len(self._held[: found.start].rstrip())
        self._emit_content(self._held[:cut])
        self._held = self._held[cut:]
        if found.tag is None:
            return False
        skipped = len(found.tag) + found.start - cut
        if found.tag == THOUGHT_END:
            self._emit_content(self._held[: found.start - cut])
            self._held, self._last = self._held[skipped:], ">"
        elif found.tag == OPEN:
            self._held, self._raw, self._state = self._held[skipped:], OPEN, self._opened
        else:
            self._held, self._raw = self._held[found.start - cut :], ""
            self._consume(len(FUNCTION), self._function_name)
        return True

    def _opened(self) -> bool:
        rest = self._skip_space()
        if rest.startswith(FUNCTION):
            self._consume(len(FUNCTION), self._function_name)
        elif rest.startswith(CLOSE):  # an empty call is not a call
            self._consume(len(CLOSE), self._closed)
        elif rest.startswith(OPEN):
            self._consume(len(OPEN), self._opened)
        elif rest.startswith("{"):
            self._state = self._json_head
        elif any(tag.startswith(rest) for tag in (FUNCTION, CLOSE, OPEN)):
            return False
        else:
            self._not_a_call()
        return True

    def _function_name(self) -> bool:
        end = next((position for position, letter in enumerate(self._held) if letter in "><\n"), len(self._held))
        if end > LONGEST_NAME:
            self._not_a_call()
        elif end == len(self._held):
            return False
        elif self._held[end] != ">" or not TOOL_NAME.fullmatch(self._held[:end].strip()):
            self._not_a_call()
        else:
            self._begin(self._held[:end].strip())
            self._consume(end + 1, self._body)
        return True

    def _body(self) -> bool:
        rest = self._skip_space()
        if rest.startswith(PARAMETER):
            self._consume(len(PARAMETER), self._parameter_name)
        elif rest.startswith(FUNCTION_END):
            self._close_arguments()
            self._consume(len(FUNCTION_END), self._after)
        elif rest.startswith(CLOSE):
            self._close_arguments()
            self._consume(len(CLOSE), self._closed)
        elif rest.startswith((OPEN, FUNCTION)):  # the next call begins, and this one was never closed
            self._close_arguments()
            self._state = self._after
        elif any(tag.startswith(rest) for tag in (PARAMETER, FUNCTION_END, CLOSE, OPEN, FUNCTION)):
            return False
        else:
            self._held = rest[1:]  # stray text between parameters
        return True

    def _parameter_name(self) -> bool:
        key, closed, rest = self._held.partition(">")
        if not closed:
            return False
        self._key = key.strip()
        schema = self._tools.get(self._name)
        self._types = parameter_types(schema, self._key)
        self._duplicate = self._key in self._given
        self._ends = ValueEnds(_names(schema) - self._given - {self._key}, bool(self._types & {"array", "object"}))
        self._held, self._fresh = rest, True
        if self._types <= STRING:
            self._arguments(self._member_start() + '"')
            self._state = self._string
        else:
            self._state = self._value
        return True

    def _string(self) -> bool:
        """A string value, which streams. One newline at each end belongs to the format."""
        if self._fresh and self._held:
            self._held, self._fresh = self._held.removeprefix("\n"), False
        end = self._ends.find(self._held)
        if end:
            self._arguments(escape(self._held[: end.start].removesuffix("\n")) + '"')
            self._held, self._state = self._held[end.stop :], self._body
            return True
        cut = self._ends.cut(self._held)
        self._arguments(escape(self._held[:cut]))
        self._held = self._held[cut:]
        self._ends.consumed(cut)
        return False

    def _value(self) -> bool:
        """A value of another type, which is emitted when it is complete."""
        end = self._ends.find(self._held)
        if not end:
            return False
        self._member(self._held[: end.start])
        self._held, self._state = self._held[end.stop :], self._body
        return True

    def _after(self) -> bool:
        """After a function: the end of the call, or another function in the same call."""
        rest = self._skip_space()
        if rest.startswith(CLOSE):
            self._consume(len(CLOSE), self._closed)
        elif rest.startswith(FUNCTION):
            self._raw = ""
            self._consume(len(FUNCTION), self._function_name)
        elif any(tag.startswith(rest) for tag in (CLOSE, FUNCTION)):
            return False
        else:
            self._state = self._content
        return True

    def _closed(self) -> bool:
        """After the end of a call. A second closing tag is dropped."""
        rest = self._held.lstrip()
        if rest.startswith(CLOSE):
            self._held = rest[len(CLOSE) :]
        elif CLOSE.startswith(rest):
            return False
        else:
            self._state = self._content
        return True

    def _json_head(self) -> bool:
        """A call in JSON up to its arguments, or all of it if they come before the name."""
        head = call_head(self._held)
        if isinstance(head, Incomplete):
            return False
        if isinstance(head, Malformed) or not TOOL_NAME.fullmatch(head.name):
            self._not_a_call()
            return True
        self._begin(head.name)
        if head.arguments is None:
            self._held, self._end, self._state = self._held[head.stop :], ObjectEnd(), self._json_arguments
        else:
            self._arguments(head.arguments)
            self._held, self._state = self._held[head.stop :], self._json_tail
        return True

    def _json_arguments(self) -> bool:
        """The arguments of a call in JSON, which stream."""
        stop = self._end.find(self._held)
        if stop is None:
            self._arguments(self._held)
            self._held = ""
            return False
        self._arguments(self._held[:stop])
        self._held, self._state = self._held[stop:], self._json_tail
        return True

    def _json_tail(self) -> bool:
        _, closed, rest = self._held.partition(CLOSE)
        if not closed:
            self._held = self._held[len(self._held) - partial_tag((CLOSE,), self._held) :]
            return False
        self._held, self._state = rest, self._closed
        return True

    @property
    def _json_states(self) -> tuple[Callable[[], bool], ...]:
        return self._json_arguments, self._json_tail

    # -- output

    def _emit_content(self, text: str) -> None:
        if not self._emitted_content and self._index >= 0:
            text = text.lstrip()  # content after calls, if there was none before them
        if text:
            self._emitted_content, self._last = True, text[-1]
            self._out.append(Content(text))

    def _begin(self, name: str) -> None:
        self._index, self._name, self._given = self._index + 1, name, set()
        self._out.append(CallStart(self._index, name))

    def _arguments(self, text: str) -> None:
        if text and not self._duplicate:
            self._out.append(CallArguments(self._index, text))

    def _member_start(self) -> str:
        started = ", " if self._given else "{"
        self._given.add(self._key)
        return started + json.dumps(self._key, ensure_ascii=False) + ": "

    def _member(self, value: str) -> None:
        value = value.removeprefix("\n").removesuffix("\n")
        self._arguments(self._member_start() + to_json(value, self._types))

    def _close_arguments(self) -> None:
        self._duplicate = False
        self._arguments("}" if self._given else "{}")

    def _not_a_call(self) -> None:
        """The text only looked like a call: what was consumed becomes content, and parsing starts again."""
        self._emit_content(self._raw)
        self._state = self._content

    # -- consuming held text

    def _skip_space(self) -> str:
        rest = self._held.lstrip()
        self._raw += self._held[: len(self._held) - len(rest)]
        self._held = rest
        return rest

    def _consume(self, count: int, then: Callable[[], bool]) -> None:
        self._raw += self._held[:count]
        self._held, self._state = self._held[count:], then


def _names(schema: Any) -> set[str]:
    """The parameters that a tool's schema lists."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return set(properties) if isinstance(properties, Mapping) else set()
