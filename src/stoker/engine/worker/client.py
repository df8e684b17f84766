"""The client's side of an engine, for threads and for asyncio alike: submit, read a stream of events, cancel.

Where the engine runs is decided by the two classes that share this: `LocalEngine` here (a thread, for tests and small
tools) and `EngineProcess` in `process.py`.
"""

import asyncio
import pickle
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from stoker.engine.event import Depth, Event
from stoker.engine.worker.loop import EngineLoop
from stoker.engine.worker.messages import (
    Answer,
    AskStats,
    Cancel,
    Command,
    Ended,
    Events,
    ReleaseMemory,
    Report,
    RequestBody,
    Shutdown,
    Submit,
)
from stoker.errors import EngineError, RequestError, StokerError
from stoker.sampling.settings import Sampling

if TYPE_CHECKING:
    from stoker.engine.engine import Engine
    from stoker.engine.event import EngineStats
    from stoker.sampling.mask import TokenMask

SHUT = "the engine was shut down."
Sleeper = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]  # a reader under asyncio that waits


class Stream:
    """The events of one request, for one reader: `for event in stream` in a thread, `async for` under asyncio.

    The last event says why the request ended and what it cost; where it failed, `RequestError` (its own fault),
    `CheckpointError` (the weights are damaged) or `EngineError` (the engine is gone) is raised instead. Events wait
    here until they are read. A request has no more of them than its max_tokens, so a slow reader costs that much
    memory and holds up nobody. As a context manager, a stream cancels its request when it is left early.
    """

    def __init__(self, request_id: int, cancel: Callable[[int], object]) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._arrived: deque[Event | StokerError] = deque()
        self._changed = threading.Condition()
        self._sleeper: Sleeper | None = None
        self._read_out = False  # the reader has seen the last event

    def cancel(self) -> None:
        """Takes effect within one step; the stream then ends with a cancelled event. Nothing happens after the end."""
        self._cancel(self.request_id)

    def follow(self, callback: Callable[[Event], object]) -> "Future[Event]":
        """Calls back with every event, from a thread of its own, so that a slow callback holds up nobody.

        The future has the last event, or what the request failed with. A callback that raises fails its own request:
        it is cancelled, and the future has the callback's error.
        """
        ended: Future[Event] = pending()

        def run() -> None:
            try:
                for event in self:
                    callback(event)
                    if event.finish:
                        ended.set_result(event)
            except BaseException as error:
                self.cancel()
                ended.set_exception(error)

        threading.Thread(target=run, name=f"stoker-request-{self.request_id}", daemon=True).start()
        return ended

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        with self._changed:
            while not self._arrived:
                if self._read_out:
                    raise StopIteration
                self._changed.wait()
            return self._take()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while True:
            with self._changed:
                if self._arrived:
                    return self._take()
                if self._read_out:
                    raise StopAsyncIteration
                loop = asyncio.get_running_loop()
                woken = loop.create_future()
                self._sleeper = loop, woken
            await woken

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._read_out:
            self.cancel()

    def _take(self) -> Event:
        event = self._arrived.popleft()
        self._read_out = isinstance(event, StokerError) or event.finish is not None
        if isinstance(event, StokerError):
            raise event
        if event.failure:
            raise event.failure
        return event

    def put(self, event: Event | StokerError) -> None:
        """For the engine's side, from any thread: an event, or why there will be no more. Never waits."""
        _wake(filter(None, [self.add(event)]))

    def add(self, event: Event | StokerError) -> "Sleeper | None":
        """As `put`, but for the asyncio reader: who it was that has to be woken."""
        with self._changed:
            self._arrived.append(event)
            self._changed.notify()
            sleeper, self._sleeper = self._sleeper, None
        return sleeper


class EngineClient(ABC):
    """Keeps the streams of live requests and hands reports to them. Subclasses carry commands to an engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[int, Stream] = {}  # of requests that have not ended
        self._tickets: dict[int, Future[EngineStats]] = {}
        self._next = self._next_ticket = 0
        self._down: StokerError | None = None  # why there is no engine to submit to

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        depth: Depth = 0,
        boundaries: Sequence[int] = (),
        mask: Callable[[], "TokenMask"] | None = None,
    ) -> Stream:
        """Queues a request, first come, first served; never waits. What is wrong with it is raised by its stream.

        All of it must pickle. `mask` makes the request's token mask and is called where the engine runs: a function of
        a module, or an instance of a class with `__call__`.
        """
        try:
            body = pickle.dumps(RequestBody(list(prompt), sampling, depth, tuple(boundaries), mask))
        except Exception as error:  # pickle raises whatever the objects raise
            raise RequestError(
                f"the request cannot be sent to the engine: {error}. A mask is a function of a module, not a closure."
            ) from error
        with self._lock:
            self._check_up()
            stream = Stream(self._next, self.cancel)
            self._send(Submit(stream.request_id, body))
            self._next += 1
            self._streams[stream.request_id] = stream
        return stream

    def cancel(self, request_id: int) -> bool:
        """Takes effect within one step. False if the request has ended already."""
        with self._lock:
            if not 0 <= request_id < self._next:
                known = f"ids 0 to {self._next - 1}" if self._next else "no requests"
                raise RequestError(f"there is no request {request_id} to cancel; this engine has had {known}.")
            live = request_id in self._streams
            if live:
                self._send(Cancel(request_id))
        return live

    def stats(self) -> "Future[EngineStats]":
        """Counters of the engine as of its next step: `.result(timeout)`, or `await asyncio.wrap_future(...)`."""
        future: Future[EngineStats] = pending()
        with self._lock:
            self._check_up()
            self._next_ticket += 1
            self._tickets[self._next_ticket] = future
            self._send(AskStats(self._next_ticket))
        return future

    def release_memory(self) -> None:
        """Gives up the prefix cache between two steps, and its memory back to the system where that can be done."""
        with self._lock:
            self._check_up()
            self._send(ReleaseMemory())

    @abstractmethod
    def close(self, drain: bool = False, timeout: float | None = None) -> None:
        """Ends the engine: after its step, or with `drain` after its requests. Nothing more is taken on meanwhile."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Hands a command over without waiting. Called with the lock held, so that the order is that of the ids."""

    def _check_up(self) -> None:
        if self._down:
            raise EngineError(f"no engine is running: {self._down}", getattr(self._down, "details", ""))

    def _deliver(self, report: Report) -> None:
        """A report of the engine, from the one thread that reads them."""
        match report:
            case Events():
                with self._lock:
                    streams = [self._streams.get(event.request_id) for event in report.events]
                    for event in report.events:
                        if event.finish:
                            self._streams.pop(event.request_id, None)
                pairs = zip(streams, report.events, strict=True)
                _wake(filter(None, [stream.add(event) for stream, event in pairs if stream]))
            case Answer():
                with self._lock:
                    future = self._tickets.pop(report.ticket)
                future.set_result(report.stats)
            case Ended():
                self._mark_down(report.error)

    def _shut(self, drain: bool) -> None:
        """Nothing more is taken on, and the engine ends after its step or its requests."""
        with self._lock:
            self._down = self._down or EngineError(SHUT)
            self._send(Shutdown(drain, SHUT))

    def _mark_down(self, error: StokerError) -> None:
        """There is no engine any more: whatever waits for it fails. Later requests are told the first reason given."""
        with self._lock:
            self._down = self._down or error
            streams, self._streams = self._streams, {}
            tickets, self._tickets = self._tickets, {}
        for stream in streams.values():
            stream.put(copy(error))  # each its own: raising writes into an exception
        for future in tickets.values():
            future.set_exception(copy(error))


class LocalEngine(EngineClient):
    """An engine of this process, stepped by a thread of its own."""

    def __init__(self, engine: "Engine") -> None:
        super().__init__()
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._thread = threading.Thread(
            target=EngineLoop(engine, self._inbox, self._deliver).run, name="stoker-engine", daemon=True
        )
        self._thread.start()

    def close(self, drain: bool = False, timeout: float | None = None) -> None:
        """`timeout` is how long this call waits; the thread goes on to its end by itself."""
        self._shut(drain)
        self._thread.join(timeout)

    def _send(self, command: Command) -> None:
        self._inbox.put(command)


def pending() -> "Future[Any]":
    """A future that its waiters cannot cancel: under asyncio, a wait that times out would."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _wake(sleepers: Iterable[Sleeper]) -> None:
    """Calls each event loop once, however many of its readers have news: a call from another thread costs it a system
    call on either side."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for loop, woken in sleepers:
        by_loop.setdefault(loop, []).append(woken)
    for loop, futures in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(_end_sleep, futures)


def _end_sleep(futures: list["asyncio.Future[None]"]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
