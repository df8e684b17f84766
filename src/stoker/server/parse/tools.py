"""Tool calls in text that arrives in pieces, in both forms the family writes them:

    <tool_call>                              <tool_call>
    <function=NAME>                          {"name": NAME, "arguments": {...}}
    <parameter=KEY>                          </tool_call>
    VALUE
    </parameter>
    </function>
    </tool_call>

A string parameter streams as it is written, any other when it is complete, so that what came out so far is always the
beginning of one JSON object. Every decision rests on the text alone, never on where it was cut: text that could still
become a tag is held back. What turns out to be no call is content, tag and all.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from stoker.server.parse.pieces import CallArguments, CallStart, Content, Piece, beginning_of
from stoker.server.parse.tool_json import Incomplete, Malformed, ObjectEnd, call_head
from stoker.server.parse.values import STRING, escape, parameter_types, to_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
LONGEST_NAME = 256


class ToolCallParser:
    def __init__(self, tools: Mapping[str, Any]) -> None:
        """`tools` are the parameter schemas by name; a call of an unknown one is passed on, its values as strings."""
        self._tools = tools
        self._held = ""
        self._out: list[Piece] = []
        self._state: Callable[[], bool] = self._content
        self._raw = ""  # of the call at hand, in case it is none
        self._index = -1  # of the call at hand
        self._name = ""
        self._members = 0  # parameters of it that came out
        self._key = ""
        self._types: frozenset[str] = frozenset()
        self._fresh = False  # the value at hand has not begun
        self._end = ObjectEnd()
        self._said = False  # content has come out

    def push(self, text: str) -> list[Piece]:
        self._held += text
        return self._run()

    def finish(self, complete: bool) -> list[Piece]:
        """What was held back. `complete`: the model ended by itself, so that a call it left open is closed; one that
        was cut off stays open, as its finish reason says."""
        self._run()
        state, held = self._state, self._held
        self._held = ""
        if state in (self._opened, self._function_name, self._json_head):
            self._say(self._raw + held)
        elif state == self._content:
            self._say(held if held.strip() or self._index < 0 else "")
        elif complete:
            if state == self._string:
                self._arguments('"')
            elif state == self._value:
                self._member(held[: len(held) - beginning_of((PARAMETER_END,), held)])
            if state not in (self._after, self._json_arguments, self._json_tail):
                self._close_arguments()
        out, self._out = self._out, []
        return out

    def _run(self) -> list[Piece]:
        while self._state():
            pass
        out, self._out = self._out, []
        return out

    # -- states: each takes what it can of the held text and says whether another may go on

    def _content(self) -> bool:
        before, opened, rest = self._held.partition(OPEN)
        # white space before a call belongs to nobody, so it waits for what follows it
        kept = before if opened else before[: len(before) - beginning_of((OPEN,), before)]
        cut = len(kept.rstrip())
        self._say(before[:cut])
        if not opened:
            self._held = before[cut:]
            return False
        self._held, self._raw, self._state = rest, OPEN, self._opened
        return True

    def _opened(self) -> bool:
        rest = self._skip_space()
        if rest.startswith(FUNCTION):
            self._take(len(FUNCTION), self._function_name)
        elif rest.startswith("{"):
            self._state = self._json_head
        elif FUNCTION.startswith(rest):
            return False
        else:
            self._no_call()
        return True

    def _function_name(self) -> bool:
        end = next((place for place, letter in enumerate(self._held) if letter in "><\n"), len(self._held))
        if end > LONGEST_NAME:
            self._no_call()
        elif end == len(self._held):
            return False
        elif self._held[end] != ">" or not self._held[:end].strip():
            self._no_call()
        else:
            self._begin(self._held[:end].strip())
            self._take(end + 1, self._body)
        return True

    def _body(self) -> bool:
        rest = self._skip_space()
        if rest.startswith(PARAMETER):
            self._take(len(PARAMETER), self._parameter_name)
        elif rest.startswith(FUNCTION_END):
            self._close_arguments()
            self._take(len(FUNCTION_END), self._after)
        elif rest.startswith(CLOSE):
            self._close_arguments()
            self._take(len(CLOSE), self._content)
        elif any(tag.startswith(rest) for tag in (PARAMETER, FUNCTION_END, CLOSE)):
            return False
        else:
            self._held = rest[1:]  # stray text between parameters
        return True

    def _parameter_name(self) -> bool:
        key, closed, rest = self._held.partition(">")
        if not closed:
            return False
        self._key = key.strip()
        self._types = parameter_types(self._tools.get(self._name), self._key)
        self._held, self._fresh = rest, True
        if self._types <= STRING:
            self._arguments(self._member_start() + '"')
            self._state = self._string
        else:
            self._state = self._value
        return True

    def _string(self) -> bool:
        """Streams; one newline at each end is the format's, not the value's."""
        if self._fresh and self._held:
            self._held, self._fresh = self._held.removeprefix("\n"), False
        value, closed, rest = self._held.partition(PARAMETER_END)
        if closed:
            self._arguments(escape(value.removesuffix("\n")) + '"')
            self._held, self._state = rest, self._body
            return True
        cut = len(value) - beginning_of((PARAMETER_END, "\n" + PARAMETER_END), value)
        self._arguments(escape(value[:cut]))
        self._held = value[cut:]
        return False

    def _value(self) -> bool:
        """A number, list, object and the like: comes out when it is complete."""
        value, closed, rest = self._held.partition(PARAMETER_END)
        if not closed:
            return False
        self._member(value)
        self._held, self._state = rest, self._body
        return True

    def _after(self) -> bool:
        """Behind the function: the call's end, or another function in the same call."""
        rest = self._skip_space()
        if rest.startswith(CLOSE):
            self._take(len(CLOSE), self._content)
        elif rest.startswith(FUNCTION):
            self._raw = ""
            self._take(len(FUNCTION), self._function_name)
        elif any(tag.startswith(rest) for tag in (CLOSE, FUNCTION)):
            return False
        else:
            self._state = self._content
        return True

    def _json_head(self) -> bool:
        """Up to where the arguments begin, or to the end of a call that has them before its name."""
        head = call_head(self._held)
        if isinstance(head, Incomplete):
            return False
        if isinstance(head, Malformed):
            self._no_call()
            return True
        self._begin(head.name)
        if head.arguments is None:
            self._held, self._end, self._state = self._held[head.stop :], ObjectEnd(), self._json_arguments
        else:
            self._arguments(head.arguments)
            self._held, self._state = self._held[head.stop :], self._json_tail
        return True

    def _json_arguments(self) -> bool:
        """Streams as it is written."""
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
            self._held = self._held[len(self._held) - beginning_of((CLOSE,), self._held) :]
            return False
        self._held, self._state = rest, self._content
        return True

    # -- what comes out

    def _say(self, text: str) -> None:
        if not self._said and self._index >= 0:
            text = text.lstrip()  # what follows calls without a word before them
        if text:
            self._said = True
            self._out.append(Content(text))

    def _begin(self, name: str) -> None:
        self._index, self._name, self._members = self._index + 1, name, 0
        self._out.append(CallStart(self._index, name))

    def _arguments(self, text: str) -> None:
        if text:
            self._out.append(CallArguments(self._index, text))

    def _member_start(self) -> str:
        self._members += 1
        return ("{" if self._members == 1 else ", ") + json.dumps(self._key, ensure_ascii=False) + ": "

    def _member(self, value: str) -> None:
        value = value.removeprefix("\n").removesuffix("\n")
        self._arguments(self._member_start() + to_json(value, self._types))

    def _close_arguments(self) -> None:
        self._arguments("}" if self._members else "{}")

    def _no_call(self) -> None:
        """It only looked like one: what was taken of it is content, and the rest may be anything."""
        self._say(self._raw)
        self._state = self._content

    # -- taking held text

    def _skip_space(self) -> str:
        rest = self._held.lstrip()
        self._raw += self._held[: len(self._held) - len(rest)]
        self._held = rest
        return rest

    def _take(self, count: int, then: Callable[[], bool]) -> None:
        self._raw += self._held[:count]
        self._held, self._state = self._held[count:], then
