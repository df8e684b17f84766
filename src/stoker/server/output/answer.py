"""Parses a whole answer in pieces: separates reasoning from the rest, which goes to the tool-call parser."""

from collections.abc import Collection, Mapping
from typing import Any

from stoker.server.output.custom import CustomCalls
from stoker.server.output.pieces import Piece, Reasoning
from stoker.server.output.tags import THOUGHT_END, call_in_thought, partial_tag
from stoker.server.output.tool_calls import ToolCallParser

OPEN, CLOSE = "<think>", THOUGHT_END


class ReasoningSplitter:
    """Only text before the answer is reasoning. White space around it belongs to neither.

    The chat template of this model family opens the thought in the prompt, so the text begins inside it and only the
    closing tag appears. A model that opens the thought itself, or once more, is handled too.
    """

    def __init__(self, thinking: bool, tools: Collection[str] | None = None) -> None:
        """`thinking`: the prompt has opened the thought. A call of one of `tools` ends an unclosed thought and begins
        the answer, because models of this family sometimes call a tool in the middle of a thought."""
        self._tools = tools
        self._inside: bool | None = True if thinking else None  # None: only white space so far
        self._thought = thinking
        self._held = ""
        self._began = False  # reasoning has been emitted: leading white space is over
        self._answer_fresh = False  # the answer follows reasoning and is empty so far: leading space is dropped

    @property
    def thought(self) -> bool:
        """Whether there was a thought that has ended."""
        return self._thought and self._inside is False

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._inside is True

    def push(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer that are certain so far."""
        if self._inside is False:
            return "", self._answer(text)
        self._held += text
        if self._inside is None:
            stripped = self._held.lstrip()
            if len(stripped) < len(OPEN) and OPEN.startswith(stripped):
                return "", ""
            if not stripped.startswith(OPEN):
                self._inside, held, self._held = False, self._held, ""
                return "", held
            self._inside, self._thought = True, True
        thought = self._held
        if not self._began:
            while (thought := thought.lstrip()).startswith(OPEN):
                thought = thought.removeprefix(OPEN)
            self._held = thought
            if OPEN.startswith(thought):
                return "", ""
        end = thought.find(CLOSE)
        called, calls = (len(thought), False) if self._tools is None else call_in_thought(thought, self._tools)
        if calls and (end < 0 or called < end):
            return self._leave(thought[:called], thought[called:])
        if end >= 0:
            return self._leave(thought[:end], thought[end + len(CLOSE) :])
        cut = len(thought[: min(called, len(thought) - partial_tag((CLOSE,), thought))].rstrip())
        self._held = thought[cut:]
        return self._reasoning(thought[:cut]), ""

    def _leave(self, thought: str, answer: str) -> tuple[str, str]:
        self._inside, self._held, self._answer_fresh = False, "", True
        return self._reasoning(thought.rstrip()), self._answer(answer)

    def flush(self) -> tuple[str, str]:
        """The text held back, when no more text comes."""
        held, self._held = self._held, ""
        if self._inside:
            return self._reasoning(held.rstrip()), ""
        return "", held

    def _reasoning(self, text: str) -> str:
        if not self._began:
            text = text.lstrip()
            self._began = bool(text)
        return text

    def _answer(self, text: str) -> str:
        if self._answer_fresh:
            text = text.lstrip()
            self._answer_fresh = not text
        return text


class AnswerParser:
    def __init__(
        self,
        thinking: bool,
        tools: Mapping[str, Any] | None = None,
        strict: Collection[str] = (),
        custom: Collection[str] = (),
    ) -> None:
        """`thinking`: the prompt has opened a thought. `tools`: schemas by name, None if calls are not parsed.
        `strict`: tools whose calls a grammar constrains; these always begin with the opening tag. `custom`: tools that
        take plain text, which is what comes out as the arguments of their calls."""
        self._splitter = ReasoningSplitter(thinking, tools)
        self._calls = ToolCallParser(tools, strict)
        self._custom = CustomCalls(custom) if custom else None

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._splitter.thinking

    def push(self, text: str) -> list[Piece]:
        return self._pieces(*self._splitter.push(text)) if text else []

    def finish(self, complete: bool = True) -> list[Piece]:
        """The remaining pieces. `complete`: the model ended the answer itself and was not cut off."""
        pieces = self._pieces(*self._splitter.flush()) + self._plain(self._calls.finish(complete))
        return pieces + self._custom.finish() if self._custom else pieces

    def _pieces(self, reasoning: str, answer: str) -> list[Piece]:
        pieces: list[Piece] = [Reasoning(reasoning)] if reasoning else []
        if answer:
            self._calls.thought = self._splitter.thought
            pieces += self._plain(self._calls.push(answer))
        return pieces

    def _plain(self, pieces: list[Piece]) -> list[Piece]:
        """Pieces of calls, those of custom tools with their text."""
        return self._custom.push(pieces) if self._custom else pieces
