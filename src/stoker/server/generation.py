"""One answer under way: the engine's events in, text, reasoning, tool calls and counts out."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker.engine.request import Event, Finish, Stats, TokenLogprob
from stoker.engine.worker.client import Stream
from stoker.errors import RequestError, StokerError
from stoker.sampling.settings import Sampling
from stoker.server.errors import TimedOut, api_error
from stoker.server.output.answer import AnswerParser
from stoker.server.output.pieces import Content, Piece
from stoker.server.served import ServedModel

if TYPE_CHECKING:
    from stoker.sampling.mask import TokenMask
    from stoker.server.metrics import Metrics

log = logging.getLogger("stoker.server")


@dataclass(frozen=True)
class Ask:
    """A checked request for one answer, ready for the engine."""

    prompt: list[int]
    sampling: Sampling
    boundaries: tuple[int, ...] = ()
    thinking: bool = False  # the prompt has opened a thought
    tools: Mapping[str, Any] | None = None  # schemas by name, where tool calls are looked for
    strict: tuple[str, ...] = ()  # those whose calls a grammar holds
    parsed: bool = True  # False: the text as it is, for completions
    mask: Callable[[], "TokenMask"] | None = None
    omitted: tuple[str, ...] = ()  # parts of the request that were left out, which the response says


class Delta(NamedTuple):  # one per step and request: cheaper to make than a frozen dataclass
    """What one step added to an answer. The last one has a finish and the whole cost."""

    pieces: list[Piece]
    tokens: tuple[int, ...] = ()
    reasoning_tokens: int = 0  # of them, those that went into a thought
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    drafts: tuple[int, ...] = ()
    forced: bool = False
    finish: Finish | None = None
    stop: str | None = None
    stats: Stats | None = None

    @property
    def right(self) -> int:
        """How many of the drafts were right."""
        return count_right(self.drafts, self.tokens)


def count_right(drafts: tuple[int, ...], tokens: tuple[int, ...]) -> int:
    """Drafts are right as far as the tokens begin with them."""
    count = 0
    for draft, token in zip(drafts, tokens, strict=False):
        if draft != token:
            break
        count += 1
    return count


@dataclass
class Progress:
    """Counts of an answer, as far as it has come."""

    tokens: int = 0
    calls: int = 0
    arrived_at: float = field(default_factory=time.perf_counter)
    first_at: float | None = None
    last_at: float | None = None


class Generation:
    """Iterate over `deltas` once; leave it through `close`, which frees the engine of what is left."""

    def __init__(
        self, stream: Stream, ask: Ask, model: ServedModel, metrics: "Metrics", arrived_at: float, timeout: float
    ) -> None:
        self.ask, self.progress = ask, Progress(arrived_at=arrived_at)
        self._stream, self._metrics = stream, metrics
        self._text = model.stream(ask.sampling.stop)
        self._parser = AnswerParser(ask.thinking, ask.tools, ask.strict) if ask.parsed else None
        self._timeout = timeout
        left = arrived_at + timeout - time.perf_counter()
        self._timer = asyncio.get_running_loop().call_later(left, self._expire)
        self._ended = False

    @property
    def started(self) -> bool:
        """Whether a first token is there: until then a request can be turned away without loss."""
        return self.progress.first_at is not None

    async def deltas(self) -> AsyncIterator[Delta]:
        """Raises ApiError where the answer ends in an error."""
        while True:
            delta = await self._next()
            yield delta
            if delta.finish:
                return

    def abort(self, error: StokerError) -> None:
        """Ends it from outside: whoever iterates is told why. The engine is free of it within a step."""
        if not self._ended:
            self._stream.put(error)
            self._stream.cancel()

    def close(self) -> None:
        self._timer.cancel()
        if not self._ended:
            self._ended = True
            self._metrics.ended(Finish.CANCELLED, self.progress, Stats(prompt_tokens=len(self.ask.prompt)))
            self._stream.cancel()

    async def _next(self) -> Delta:
        try:
            event = await anext(self._stream)
        except StokerError as error:
            self._fail()
            raise api_error(error) from error
        except StopAsyncIteration:
            raise RuntimeError("an answer was read beyond its end") from None
        return self._delta(event)

    def _expire(self) -> None:
        self.abort(
            TimedOut(
                f"the request was ended after {self._timeout:,.0f} s with {self.progress.tokens:,} tokens out. "
                "Ask for fewer tokens, or start the server with a larger --request-timeout."
            )
        )

    def _delta(self, event: Event) -> Delta:
        if event.finish is Finish.CANCELLED:  # by nobody here: the engine was told to by someone else
            self._fail()
            raise api_error(RequestError("the request was cancelled."))
        pieces: list[Piece] = []
        thought = 0
        for token in event.tokens:
            pieces += self._pieces(self._push(token))
            thought += self._parser is not None and self._parser.thinking
        if event.finish:
            pieces += self._pieces(self._text.flush())
            if self._parser:
                pieces += self._parser.finish(complete=event.finish is Finish.STOP)
        self._metrics.stepped(event, self.progress)
        if event.finish:
            self._ended = True
            self._metrics.ended(event.finish, self.progress, event.stats or Stats())
            _tell(event.finish, event.stats or Stats())
        return Delta(
            pieces,
            event.tokens,
            thought,
            event.logprobs,
            event.prompt_logprobs,
            event.drafts,
            event.forced,
            event.finish,
            event.stop,
            event.stats,
        )

    def _pieces(self, text: str) -> list[Piece]:
        if self._parser:
            return self._parser.push(text)
        return [Content(text)] if text else []

    def _push(self, token: int) -> str:
        self.progress.tokens += 1
        return self._text.push(token, may_stop=self.progress.tokens > self.ask.sampling.min_tokens)

    def _fail(self) -> None:
        if not self._ended:
            self._ended = True
            self._metrics.ended(Finish.ERROR, self.progress, Stats(prompt_tokens=len(self.ask.prompt)))


def _tell(finish: Finish, stats: Stats) -> None:
    """One line per answer, for whoever watches."""
    rate = (stats.output_tokens - 1) / stats.decode_s if stats.decode_s else 0.0
    log.info(
        "%d tokens in (%d cached), %d out in %d steps, %.0f tokens/s, %.2f s to first, %s",
        stats.prompt_tokens,
        stats.cached_tokens,
        stats.output_tokens,
        stats.steps,
        rate,
        stats.queue_s + stats.prefill_s,
        finish.value,
    )
