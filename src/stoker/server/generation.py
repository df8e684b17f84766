"""An answer in progress: engine events in; text, reasoning, tool calls and counts out."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker.engine.event import Event, Finish, Stats, TokenLogprob
from stoker.engine.worker.client import Stream
from stoker.errors import RequestError, StokerError
from stoker.sampling.settings import Sampling
from stoker.server.errors import TimedOut, api_error
from stoker.server.model import ServedModel
from stoker.server.output.answer import AnswerParser
from stoker.server.output.pieces import Content, Piece

if TYPE_CHECKING:
    from stoker.sampling.mask import TokenMask
    from stoker.server.metrics import Metrics

log = logging.getLogger("stoker.server")


@dataclass(frozen=True)
class EngineRequest:
    """A validated request for one answer, ready for the engine."""

    prompt: list[int]
    sampling: Sampling
    boundaries: tuple[int, ...] = ()
    thinking: bool = False  # the prompt has opened a thought
    tools: Mapping[str, Any] | None = None  # schemas by name; None: tool calls are not parsed
    strict: tuple[str, ...] = ()  # tools whose calls a grammar constrains
    custom: frozenset[str] = frozenset()  # tools that take plain text
    parsed: bool = True  # False: raw text, for completions
    drafted: bool = True  # False: decoded without drafts
    mask: Callable[[], "TokenMask"] | None = None
    omitted: tuple[str, ...] = ()  # parts of the request that were left out; the response names them


class Delta(NamedTuple):  # one per step and request: cheaper to create than a frozen dataclass
    """What one step added to an answer. The last delta has a finish reason and the stats of the whole answer."""

    pieces: list[Piece]
    tokens: tuple[int, ...] = ()
    reasoning_tokens: int = 0  # how many of them belong to a thought
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    drafts: tuple[int, ...] = ()
    forced: bool = False
    assumed: int | None = None  # drafts accepted unseen
    finish: Finish | None = None
    stop: str | None = None
    stats: Stats | None = None

    @property
    def accepted(self) -> int:
        """How many of the drafts were accepted."""
        return count_accepted(self.drafts, self.tokens) if self.assumed is None else self.assumed


def count_accepted(drafts: tuple[int, ...], tokens: tuple[int, ...]) -> int:
    """The number of accepted drafts: those that agree with the beginning of the step's tokens."""
    count = 0
    for draft, token in zip(drafts, tokens, strict=False):
        if draft != token:
            break
        count += 1
    return count


@dataclass
class Progress:
    """Counts of an answer so far."""

    tokens: int = 0
    arrived_at: float = field(default_factory=time.perf_counter)
    first_at: float | None = None
    last_at: float | None = None


class Generation:
    """Iterate over `deltas` once, then `close`, which cancels what is still running in the engine."""

    def __init__(
        self,
        stream: Stream,
        request: EngineRequest,
        model: ServedModel,
        metrics: "Metrics",
        arrived_at: float,
        timeout: float,
    ) -> None:
        self.request, self.progress = request, Progress(arrived_at=arrived_at)
        self._stream, self._metrics = stream, metrics
        self._text = model.stream(request.sampling.stop)
        self._parser: AnswerParser | None = None
        if request.parsed:
            self._parser = AnswerParser(request.thinking, request.tools, request.strict, request.custom)
        self._timeout = timeout
        left = arrived_at + timeout - time.perf_counter()
        self._timer = asyncio.get_running_loop().call_later(left, self._expire)
        self._ended = False

    @property
    def started(self) -> bool:
        """Whether there is a first token. Until then, a request can be refused without loss."""
        return self.progress.first_at is not None

    async def deltas(self) -> AsyncIterator[Delta]:
        """Raises ApiError if the answer ends in an error."""
        while True:
            delta = await self._next()
            yield delta
            if delta.finish:
                return

    def abort(self, error: StokerError) -> None:
        """Ends the answer with an error, which its reader gets. The engine drops the request within one step."""
        if not self._ended:
            self._stream.put(error)
            self._stream.cancel()

    def close(self) -> None:
        self._timer.cancel()
        if not self._ended:
            self._ended = True
            self._metrics.ended(Finish.CANCELLED, self.progress, Stats(prompt_tokens=len(self.request.prompt)))
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
        if event.finish is Finish.CANCELLED:  # not by this class, which marks its own cancellations as ended
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
            _log_answer(event.finish, event.stats or Stats())
        return Delta(
            pieces,
            event.tokens,
            thought,
            event.logprobs,
            event.prompt_logprobs,
            event.drafts,
            event.forced,
            event.assumed,
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
        return self._text.push(token, may_stop=self.progress.tokens > self.request.sampling.min_tokens)

    def _fail(self) -> None:
        if not self._ended:
            self._ended = True
            self._metrics.ended(Finish.ERROR, self.progress, Stats(prompt_tokens=len(self.request.prompt)))


async def merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Delta]]:
    """Deltas of all choices as they arrive, each with the index of its choice. The first error ends them all."""
    if len(generations) == 1:
        async for delta in generations[0].deltas():
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta] | None] = asyncio.Queue()

    async def pump(index: int, generation: Generation) -> None:
        async for delta in generation.deltas():
            queue.put_nowait((index, delta))

    async def pump_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, generation in enumerate(generations):
                    group.create_task(pump(index, generation))
        finally:
            queue.put_nowait(None)

    pumping = asyncio.create_task(pump_all())
    try:
        while (entry := await queue.get()) is not None:
            yield entry
        try:
            await pumping
        except* Exception as group:
            raise group.exceptions[0] from None
    finally:
        pumping.cancel()


def _log_answer(finish: Finish, stats: Stats) -> None:
    """Logs one line per answer."""
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
