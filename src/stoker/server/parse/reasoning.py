"""Reasoning and answer told apart in text that arrives in pieces."""

from stoker.server.parse.pieces import beginning_of

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """Only what comes before the answer is reasoning. White space around it belongs to neither.

    The family's chat template opens the thought in the prompt, so that the text begins inside it and only the closing
    tag is ever seen; a model that opens it itself is understood too.
    """

    def __init__(self, thinking: bool, ended_by: str | None = None) -> None:
        """`thinking`: the prompt has opened the thought. `ended_by` is a tag that ends a thought nobody closed, and
        begins the answer: models of this family sometimes call a tool in the middle of a thought."""
        self._tags = (CLOSE, ended_by) if ended_by else (CLOSE,)
        self._inside: bool | None = True if thinking else None  # None: nothing but white space was seen
        self._held = ""
        self._began = False  # reasoning has come out: white space before it is over
        self._answer_fresh = False  # the answer follows reasoning and has not begun: its white space is dropped

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
            self._inside, self._held = True, stripped.removeprefix(OPEN)
        thought = self._held
        found = [(place, tag) for tag in self._tags if (place := thought.find(tag)) >= 0]
        if found:
            place, tag = min(found)
            rest = thought[place + len(tag) :] if tag == CLOSE else thought[place:]
            self._inside, self._held, self._answer_fresh = False, "", True
            return self._reasoning(thought[:place].rstrip()), self._answer(rest)
        cut = len(thought[: len(thought) - beginning_of(self._tags, thought)].rstrip())
        self._held = thought[cut:]
        return self._reasoning(thought[:cut]), ""

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
