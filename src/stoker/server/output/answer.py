"""The text of one answer, from its first piece to its last, as reasoning, content and tool calls."""

from collections.abc import Collection, Mapping
from typing import Any

from stoker.server.output.pieces import Piece, Reasoning
from stoker.server.output.reasoning import ReasoningSplitter
from stoker.server.output.tool_calls import ToolCallParser


class AnswerParser:
    def __init__(self, thinking: bool, tools: Mapping[str, Any] | None = None, strict: Collection[str] = ()) -> None:
        """`thinking`: the prompt has opened a thought. `tools`: schemas by name; None where no calls are looked for.
        `strict`: those of them whose calls a grammar holds, which begin with the opening tag."""
        self._splitter = ReasoningSplitter(thinking, tools)
        self._calls = ToolCallParser(tools, strict)

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._splitter.thinking

    def push(self, text: str) -> list[Piece]:
        return self._pieces(*self._splitter.push(text)) if text else []

    def finish(self, complete: bool = True) -> list[Piece]:
        """The rest. `complete`: the model ended by itself and was not cut off."""
        pieces = self._pieces(*self._splitter.flush())
        return pieces + self._calls.finish(complete)

    def _pieces(self, reasoning: str, answer: str) -> list[Piece]:
        pieces: list[Piece] = [Reasoning(reasoning)] if reasoning else []
        if answer:
            self._calls.thought = self._splitter.thought
            pieces += self._calls.push(answer)
        return pieces
