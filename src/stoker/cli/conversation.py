"""A conversation with an engine, turn by turn. It handles the chat template and thoughts, not the terminal."""

from collections import deque
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from stoker.engine.event import Depth, Finish, Stats
from stoker.errors import RequestError
from stoker.server.output.answer import OPEN, ReasoningSplitter

if TYPE_CHECKING:
    from stoker.engine.tokenizer import Tokenizer
    from stoker.engine.worker.client import EngineClient, Stream
    from stoker.sampling.settings import Sampling


class Piece(NamedTuple):
    text: str
    thought: bool


class Reply:
    """An answer in progress: iterate over its pieces. After `stop`, the pieces made until then still arrive."""

    def __init__(self, stream: "Stream", tokenizer: "Tokenizer", thinking: bool) -> None:
        self._stream, self._decode = stream, tokenizer.stream().push
        self._splitter = ReasoningSplitter(thinking)
        self._ready: deque[Piece] = deque()
        self.finish: Finish | None = None
        self.stats = Stats()  # filled with the last piece
        self.answer = ""  # without thoughts

    def stop(self) -> None:
        self._stream.cancel()

    @property
    def stopped(self) -> bool:
        return self.finish is Finish.CANCELLED

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        while not self._ready:
            event = next(self._stream)
            self._add(*self._splitter.push("".join(map(self._decode, event.tokens))))
            if event.finish:
                self.finish, self.stats = event.finish, event.stats or self.stats
                self._add(*self._splitter.flush())
        piece = self._ready.popleft()
        if not piece.thought:
            self.answer += piece.text
        return piece

    def _add(self, thought: str, answer: str) -> None:
        self._ready += [piece for piece in (Piece(thought, True), Piece(answer, False)) if piece.text]


class Conversation:
    def __init__(
        self,
        engine: "EngineClient",
        tokenizer: "Tokenizer",
        sampling: "Sampling",
        context: int,
        depth: Depth = 0,
        system: str | None = None,
        think: bool = True,
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._sampling, self._context, self._depth = sampling, context, depth
        self._system, self._think = system, think
        self.costs: list[Stats] = []  # of every answer, including those before a reset
        self.reset()

    def reset(self) -> None:
        """Starts a new conversation with the same system message."""
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self._system}] if self._system else []

    def ask(self, text: str) -> Reply:
        """Starts the answer to `text`. `keep` makes the turn part of the conversation."""
        messages = [*self.messages, {"role": "user", "content": text}]
        options = {} if self._think else {"enable_thinking": False}
        prompt = self._tokenizer.encode_chat(messages, **options)
        room = self._context - len(prompt)
        if room < 1:
            raise RequestError(
                f"the conversation has {len(prompt):,} tokens with this message, and the context is {self._context:,}: "
                "there is no room for an answer. Begin anew with /reset, or start with a larger --context."
            )
        # The next turn repeats this prompt up to the beginning of the answer, so a snapshot there is useful.
        said = self._tokenizer.encode_chat(messages, begin_answer=False, **options)
        boundary = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, said, strict=False)))
        sampling = replace(self._sampling, max_tokens=min(self._sampling.max_tokens, room))
        stream = self._engine.submit(prompt, sampling, self._depth, (boundary,))
        return Reply(stream, self._tokenizer, prompt_opens_thought(self._tokenizer, prompt))

    def keep(self, text: str, reply: Reply) -> None:
        """Adds a finished or stopped turn to the conversation, without thoughts. A question that was stopped before its
        answer began is dropped."""
        self.costs.append(reply.stats)
        if reply.answer or not reply.stopped:
            self.messages.append({"role": "user", "content": text})
            self.messages.append({"role": "assistant", "content": reply.answer})


def prompt_opens_thought(tokenizer: "Tokenizer", prompt: list[int]) -> bool:
    """Whether the chat template has begun a thought, so that the answer starts inside it."""
    return tokenizer.decode(prompt[-8:]).rstrip().endswith(OPEN)
