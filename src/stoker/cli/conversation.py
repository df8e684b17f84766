"""A conversation with an engine, turn by turn. Knows the chat template and thoughts, and nothing of terminals."""

from collections import deque
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from stoker.engine.request import Depth, Finish, Stats
from stoker.errors import RequestError

if TYPE_CHECKING:
    from stoker.engine.client import EngineClient, Stream
    from stoker.engine.tokenizer import Tokenizer
    from stoker.speculate.sampling import Sampling

OPEN, CLOSE = "<think>", "</think>"


class Piece(NamedTuple):
    text: str
    thought: bool


class ThoughtSplitter:
    """Tells thoughts from the answer in text that arrives in pieces. Only what comes before an answer is a thought."""

    def __init__(self, thinking: bool) -> None:
        """`thinking`: the prompt has opened the thought already."""
        self._inside = True if thinking else None  # None: the first word is not known yet
        self._held = ""
        self._fresh = True  # nothing has come out of this part: white space before it is left out

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces = []
        if self._inside is None:
            self._held = self._held.lstrip()
            if len(self._held) < len(OPEN) and OPEN.startswith(self._held):
                return []
            self._inside = self._held.startswith(OPEN)
            self._held = self._held.removeprefix(OPEN)
        if self._inside:
            thought, closed, rest = self._held.partition(CLOSE)
            if not closed:
                cut = len(thought[: len(thought) - _beginning_of(CLOSE, thought)].rstrip())
                self._held = thought[cut:]
                return self._out(thought[:cut])
            pieces = self._out(thought.rstrip())
            self._inside, self._held, self._fresh = False, rest, True
        return pieces + self.flush()

    def flush(self) -> list[Piece]:
        """What was held back as half a tag or white space that may end a thought, once no more text comes."""
        held, self._held = self._held, ""
        return self._out(held)

    def _out(self, text: str) -> list[Piece]:
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return [Piece(text, bool(self._inside))] if text else []


class Reply:
    """One answer as it comes: iterate over its pieces. `stop` ends it early; what was made until then still comes."""

    def __init__(self, stream: "Stream", tokenizer: "Tokenizer", thinking: bool) -> None:
        self._stream, self._decode = stream, tokenizer.stream().push
        self._splitter = ThoughtSplitter(thinking)
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
            self._ready += self._splitter.push("".join(map(self._decode, event.tokens)))
            if event.finish:
                self.finish, self.stats = event.finish, event.stats or self.stats
                self._ready += self._splitter.flush()
        piece = self._ready.popleft()
        if not piece.thought:
            self.answer += piece.text
        return piece


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
        self.costs: list[Stats] = []  # of every answer, those of forgotten conversations included
        self.reset()

    def reset(self) -> None:
        """Forgets what was said; the system message stays."""
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self._system}] if self._system else []

    def ask(self, text: str) -> Reply:
        """The answer to `text`. The turn becomes part of the conversation with `keep`."""
        messages = [*self.messages, {"role": "user", "content": text}]
        options = {} if self._think else {"enable_thinking": False}
        prompt = self._tokenizer.encode_chat(messages, **options)
        room = self._context - len(prompt)
        if room < 1:
            raise RequestError(
                f"the conversation has {len(prompt):,} tokens with this message, and the context is {self._context:,}: "
                "there is no room for an answer. Begin anew with /reset, or start with a larger --context."
            )
        # the next turn repeats this prompt up to where the answer begins: a good place for the prefix cache
        said = self._tokenizer.encode_chat(messages, begin_answer=False, **options)
        boundary = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, said, strict=False)))
        sampling = replace(self._sampling, max_tokens=min(self._sampling.max_tokens, room))
        stream = self._engine.submit(prompt, sampling, self._depth, (boundary,))
        thinking = self._tokenizer.decode(prompt[-8:]).rstrip().endswith(OPEN)
        return Reply(stream, self._tokenizer, thinking)

    def keep(self, text: str, reply: Reply) -> None:
        """Makes a finished or stopped turn part of the conversation, thoughts left out. A question that was stopped
        before its answer began is forgotten."""
        self.costs.append(reply.stats)
        if reply.answer or not reply.stopped:
            self.messages.append({"role": "user", "content": text})
            self.messages.append({"role": "assistant", "content": reply.answer})


def _beginning_of(tag: str, text: str) -> int:
    """Length of the longest end of `text` that is a beginning of `tag`."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
