"""Reasoning and answer told apart in text that arrives in pieces."""

from collections.abc import Collection

from stoker.server.output.pieces import beginning_of
from stoker.server.output.tags import THOUGHT_END, call_in_thought

OPEN, CLOSE = "<think>", THOUGHT_END


class ReasoningSplitter:
    """Only what comes before the answer is reasoning. White space around it belongs to neither.

    The family's chat template opens the thought in the prompt, so that the text begins inside it and only the closing
    tag is ever seen; a model that opens it itself, or once more, is understood too.
    """

    def __init__(self, thinking: bool, tools: Collection[str] | None = None) -> None:
        """`thinking`: the prompt has opened the thought. A call of one of `tools` ends a thought nobody closed, and
        begins the answer: models of this family sometimes call a tool in the middle of a thought."""
        self._tools = tools
        self._inside: bool | None = True if thinking else None  # None: nothing but white space was seen
        self._thought = thinking
        self._held = ""
        self._began = False  # reasoning has come out: white space before it is over
        self._answer_fresh = False  # the answer follows reasoning and has not begun: its white space is dropped

    @property
    def thought(self) -> bool:
        """Whether there was a thought, and it is over."""
        return self._thought and self._inside is False

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._inside is True

    def push(self, text: str) -> tuple[str, str]:
        """Reasoning and answer that can be told for certain now."""
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
        cut = len(thought[: min(called, len(thought) - beginning_of((CLOSE,), thought))].rstrip())
        self._held = thought[cut:]
        return self._reasoning(thought[:cut]), ""

    def _leave(self, thought: str, answer: str) -> tuple[str, str]:
        self._inside, self._held, self._answer_fresh = False, "", True
        return self._reasoning(thought.rstrip()), self._answer(answer)

    def flush(self) -> tuple[str, str]:
        """What was held back, once no more text comes."""
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
