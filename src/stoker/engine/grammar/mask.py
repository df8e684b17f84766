"""A grammar as the engine's token mask, which a worker process computes."""

import json
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch import Tensor

from stoker.engine.grammar.workers import WORKERS, Question, Worker
from stoker.engine.rules import Grammar
from stoker.errors import RequestError
from stoker.sampling.mask import RemoteMask

QUESTION_S = 2.0  # time limit of one question: the masks of one step
REPLAY_S = 0.001  # added for each token that the matcher must consume first
SLOW_S, MOST_SLOW_S = 0.05, 20.0  # questions slower than the first may take the second in total


class GrammarMask(RemoteMask):
    """The state of one request in a grammar. Answers depend on `output` alone.

    A question covers a text and the drafts after it; its answer is kept until the next question.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._worker: Worker | None = None
        self._number = 0
        self._known: list[int] = []  # tokens that the worker's matcher has consumed for this request
        # text, drafts and first mask of the pending question
        self._asked: tuple[list[int], list[int], Tensor | None] | None = None
        self._text: list[int] | None = None  # the text that the latest answer is about ...
        self._behind: list[int] = []  # ... and the drafts after it, or the tokens forced there
        self._masks: list[Tensor] = []  # after the text, and after each allowed draft
        self._forced: list[int] = []
        self._room = 0
        self._error: RequestError | None = None
        self._slow = 0.0

    # -- called by the engine

    @property
    def connection(self) -> Connection | None:
        return self._worker.connection if self._worker and self.waiting else None

    @property
    def waiting(self) -> bool:
        if self._asked and self._worker:
            self._worker.poll()
        return self._asked is not None

    def ask(self, output: Sequence[int], drafts: Sequence[int] = (), room: int = 0) -> int:
        text, behind, covered = self._segment(output, list(drafts))
        if text is None:
            if self._error is None:
                self._attach()  # so that it compiles while the model thinks
            return covered
        if self.waiting or self._error:
            return 0
        first = self._masks[0] if text == self._text else None
        if first is None or (behind and not self._forced and behind != self._behind and first[behind[0]]):
            self._ask(text, behind, first, room)
        return covered

    def ready(self, output: Sequence[int]) -> bool:
        text = self._constrained_part(output)
        if text is None:
            return True
        return not self.waiting and (self._error is not None or self._text == text)

    def allowed(self, output: Sequence[int]) -> Tensor | None:
        text = self._constrained_part(output)
        if text is None:
            free = self._grammar.opened_by is not None
            return None if free else _while_thinking(self._grammar.vocab_size, self._grammar.ends)
        index = self._index(text)
        if index is None:
            self._wait(text)
            index = 0
        if index >= len(self._masks):
            raise RequestError("the grammar has nothing to say behind this draft.")
        return self._masks[index]

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        text = self._constrained_part(output)
        if text is None:
            return ()
        if text != self._text or not self._room:
            self._wait(text)
        return self._forced

    def close(self) -> None:
        if self._worker:
            self._worker.remove(self, self._number)
            self._worker = None
            WORKERS.evict()

    # -- called by the worker

    def answered(self, head: dict[str, object], masks: bytes, seconds: float) -> None:
        assert self._asked is not None
        (text, behind, first), self._asked = self._asked, None
        if seconds > SLOW_S:
            self._slow += seconds
        if "error" in head:
            self._known = []
            self._error = RequestError(f"the grammar failed: {head['error']}")
        elif self._slow > MOST_SLOW_S:
            self._error = RequestError(
                f"the grammar is too complex: its masks took {self._slow:.0f} s, and may take {MOST_SLOW_S:g}."
            )
        else:
            self._forced = [int(token) for token in head["forced"]]  # type: ignore[attr-defined]
            self._text, self._behind = text, self._forced or behind
            self._known = (text + self._behind)[: int(head["at"])]  # type: ignore[call-overload]
            count = int(head["masks"])  # type: ignore[call-overload]
            found = _unpacked(masks, count, self._grammar.vocab_size)
            self._masks = found if first is None else [first, *found]

    def lost(self, error: RequestError | None) -> None:
        """The worker died. `error` is set if this request is at fault; otherwise the question is asked again."""
        self._worker, self._known = None, []
        asked, self._asked = self._asked, None
        if not asked:
            self._error = error
        elif not error:
            self._ask(*asked, self._room)
        elif asked[2] is None or self._slow > MOST_SLOW_S:
            self._error = error
        else:  # a draft may be at fault, which the model may never choose: the step goes on without drafts
            self._slow += QUESTION_S
            self._text, self._behind, self._masks, self._forced = asked[0], asked[1], [asked[2]], []

    # -- details

    def _constrained_part(self, output: Sequence[int]) -> list[int] | None:
        """The part of the output that the grammar applies to, or None if it does not apply now."""
        tokens = list(output)
        if self._grammar.opened_by is not None:
            if self._grammar.opened_by not in tokens:
                return None
            tokens = tokens[len(tokens) - tokens[::-1].index(self._grammar.opened_by) :]
            return None if any(token in tokens for token in self._grammar.closed_by) else tokens
        if self._grammar.after is None:
            return tokens
        try:
            return tokens[tokens.index(self._grammar.after) + 1 :]
        except ValueError:
            return None

    def _segment(self, output: Sequence[int], drafts: list[int]) -> tuple[list[int] | None, list[int], int]:
        """What one question can cover: the first text that the grammar applies to, the drafts that continue it, and how
        many drafts that covers, including those that the grammar does not apply to."""
        switches = {self._grammar.after, self._grammar.opened_by, *self._grammar.closed_by}
        text = self._constrained_part(output)
        if switches.isdisjoint(drafts):
            return text, [] if text is None else drafts, len(drafts)
        begun, behind = 0, 0
        for count in range(1, len(drafts) + 1):
            found = self._constrained_part([*output, *drafts[:count]])
            if text is None:
                text, begun = found, count
            elif found == text + drafts[begun:count]:
                behind = count - begun
            elif found is not None:
                return text, drafts[begun : begun + behind], count - 1
        return text, drafts[begun : begun + behind], len(drafts)

    def _index(self, text: list[int]) -> int | None:
        """The number of drafts between the text of the latest answer and `text`; None if it was another text."""
        if self._text is None or self._text != text[: len(self._text)]:
            return None
        behind = text[len(self._text) :]
        return len(behind) if behind == self._behind[: len(behind)] else None

    def _wait(self, text: list[int]) -> None:
        """Asks and blocks until the answer is there. Raises the error with which the request failed."""
        while self.waiting:
            self._poll()
        if self._error is None:
            self._ask(text, [], None, room=16)
        while self.waiting:
            self._poll()
        if self._error is not None:
            error, self._error, self._text = self._error, None, None
            raise error

    def _poll(self) -> None:
        assert self._worker is not None
        self._worker.connection.poll(0.1)

    def _attach(self) -> Worker | None:
        """The worker; None, with `_error` set, if none could be started."""
        if self._worker is None or self._worker.failure is not None:
            try:
                self._worker = WORKERS.get(
                    self._grammar.server, self._grammar.lark, 2**20 + 64 * self._grammar.vocab_size
                )
            except RequestError as error:
                self._error = error
                return None
            self._worker.masks.add(self)
            self._number, self._known = self._worker.number(), []
        return self._worker

    def _ask(self, text: list[int], drafts: list[int], first: Tensor | None, room: int) -> None:
        worker = self._attach()
        if worker is None:
            return
        keep = _common_prefix(self._known, text)
        add = text[keep:]
        question = {"keep": keep, "add": add, "drafts": drafts, "room": room, "first": first is None}
        message = json.dumps({"id": self._number, **question}).encode()
        self._asked, self._room = (text, drafts, first), room
        worker.unsent.append(Question(self, message, QUESTION_S + REPLAY_S * len(add)))
        worker.poll()


def _common_prefix(one: list[int], other: list[int]) -> int:
    """The length of the common prefix."""
    if other[: len(one)] == one:
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _unpacked(masks: bytes, count: int, vocab_size: int) -> list[Tensor]:
    if not count:
        return []
    bits = np.frombuffer(masks, dtype=np.uint8).reshape(count, -1)
    return list(torch.from_numpy(np.unpackbits(bits, axis=1, bitorder="little")[:, :vocab_size].view(np.bool_)))


def _while_thinking(vocab_size: int, ends: tuple[int, ...]) -> Tensor:
    """The mask while the model thinks: everything but the end of the answer."""
    allowed = torch.ones(vocab_size, dtype=torch.bool)
    allowed[list(ends)] = False
    return allowed
