"""Sending answers: server-sent events with an eye on the client, and plain answers that stop when nobody waits."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stoker.server.errors import ApiError

log = logging.getLogger("stoker.server")
T = TypeVar("T")
DONE = "data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or a proxy would collect the events
]
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class ClientGone(Exception):
    """Nobody is there any more to answer to."""


def data(message: dict[str, Any]) -> str:
    """One event without a name."""
    return f"data: {_encode(message)}\n\n"


def event(name: str, message: dict[str, Any]) -> str:
    return f"event: {name}\n{data(message)}"


class EventStream(Response):
    """Sends events until they end or the client is gone, whichever comes first. The iterator is closed in any case,
    which is what frees the engine; a client that takes nothing for `stall_timeout` seconds counts as gone."""

    def __init__(
        self,
        events: AsyncIterator[str],
        on_error: Callable[[ApiError], str],
        stall_timeout: float,
        end: str,
        close: Callable[[], None],
    ) -> None:
        """`on_error` is the event that tells a client why its stream ends early; `end` follows the last event; `close`
        is called when nothing more will be read of the events, whether or not they were ever begun."""
        super().__init__()
        self._events, self._on_error, self._stall_timeout = events, on_error, stall_timeout
        self._end, self._close = end, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        patience = _Patience(self._stall_timeout)

        async def write(text: str, more: bool = True) -> None:
            patience.begin()
            await send({"type": "http.response.body", "body": text.encode("utf-8", "replace"), "more_body": more})
            patience.end()

        async def stream() -> None:
            patience.watch(asyncio.current_task())
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            async with aclosing(self._events) as events:  # type: ignore[type-var]
                try:
                    async for text in events:
                        await write(text)
                    await write(self._end, more=False)
                except ApiError as error:
                    await write(self._on_error(error) + self._end, more=False)
                except asyncio.CancelledError:
                    if not patience.lost:
                        raise
                except Exception as error:
                    log.exception("an answer broke off")
                    broken = ApiError(500, f"The answer broke off: {type(error).__name__}.")
                    await write(self._on_error(broken) + self._end, more=False)

        try:
            with suppress(ClientGone):
                await _while_connected(receive, stream())
        finally:
            patience.watch(None)
            self._close()


class _Patience:
    """Cancels a task that takes too long over one write. One timer looks after all writes of a stream: there is a write
    per step, and a timer for each would cost as much as making its text."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._loop = seconds, asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._began: float | None = None  # the write under way, if one is
        self.lost = False

    def watch(self, task: "asyncio.Task[None] | None") -> None:
        self._task = task
        if self._timer:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._seconds, self._look) if task else None

    def begin(self) -> None:
        self._began = self._loop.time()

    def end(self) -> None:
        self._began = None

    def _look(self) -> None:
        """Looks again when the write under way would have taken too long."""
        waited = 0.0 if self._began is None else self._loop.time() - self._began
        if waited < self._seconds:
            self._timer = self._loop.call_later(self._seconds - waited, self._look)
        elif self._task:
            self.lost = True
            log.warning("a client took nothing of its stream for %.0f s and was let go", self._seconds)
            self._task.cancel()


async def while_connected(request: Request, answer: Awaitable[T]) -> T:
    """The answer, or ClientGone as soon as the client hangs up."""
    return await _while_connected(request.receive, answer)


async def _while_connected(receive: Receive, answer: Awaitable[T]) -> T:
    async def hang_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, listening = asyncio.ensure_future(answer), asyncio.create_task(hang_up())
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
            raise ClientGone
        return working.result()
    finally:
        listening.cancel()
        working.cancel()
