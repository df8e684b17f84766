"""The text of one answer, from its first piece to its last, as reasoning, content and tool calls."""

from collections.abc import Mapping
from typing import Any

from stoker.server.parse.pieces import Content, Piece, Reasoning
from stoker.server.parse.reasoning import ReasoningSplitter
from stoker.server.parse.tools import OPEN, ToolCallParser


class AnswerParser:
    def __init__(self, thinking: bool, tools: Mapping[str, Any] | None = None) -> None:
        """`thinking`: the prompt has opened a thought. `tools`: schemas by name; None where no calls are looked for."""
        self._splitter = ReasoningSplitter(thinking, ended_by=OPEN if tools is not None else None)
        self._calls = ToolCallParser(tools) if tools is not None else None

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._splitter.thinking

    def push(self, text: str) -> list[Piece]:
        return self._pieces(*self._splitter.push(text)) if text else []

    def finish(self, complete: bool = True) -> list[Piece]:
        """The rest. `complete`: the model ended by itself and was not cut off."""
        pieces = self._pieces(*self._splitter.flush())
        return pieces + self._calls.finish(complete) if self._calls else pieces

    def _pieces(self, reasoning: str, answer: str) -> list[Piece]:
        pieces: list[Piece] = [Reasoning(reasoning)] if reasoning else []
        if answer:
            pieces += self._calls.push(answer) if self._calls else [Content(answer)]
        return pieces
