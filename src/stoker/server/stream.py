"""Sends answers as server-sent events or as JSON. Either way the engine is freed as soon as the client is gone."""

import asyncio
import json
import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from stoker.server.errors import ApiError
from stoker.server.lifecycle.service import Submission

log = logging.getLogger("stoker.server")
T = TypeVar("T")
DONE = "data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or a proxy would buffer the events
]
OMITTED = "x-stoker-omitted"
MOST_OMITTED = 32  # most names in that header: more than clients send, and far below the limits of proxies
ODD = re.compile(r"[^\w.:/-]", re.ASCII)  # the names come from clients, and a header is one line of ASCII
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class ClientGone(Exception):
    """The client disconnected before the answer was complete."""


class JsonResponse(JSONResponse):
    """JSON that may contain NaN, infinities and unpaired surrogates, which a request can bring into an answer."""

    def render(self, content: Any) -> bytes:
        return encoded(content).encode("utf-8", "replace")


def encoded(message: Any) -> str:
    """JSON text. NaN and infinities become null; unpaired surrogates are replaced when the text is encoded."""
    try:
        return _encode(message)
    except ValueError:
        return _encode(_finite(message))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def data(message: dict[str, Any]) -> str:
    """A server-sent event without a name."""
    return f"data: {encoded(message)}\n\n"


def event(name: str, message: dict[str, Any]) -> str:
    return f"event: {name}\n{data(message)}"


class EventStream(Response):
    """Sends events until they end or the client disconnects. The iterator is closed in either case, which frees the
    engine. A client that stops reading is disconnected by `protocol.py`."""

    def __init__(
        self,
        events: AsyncIterator[str],
        on_error: Callable[[ApiError], str],
        end: str,
        close: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`on_error` makes the event that says why a stream ends early; `end` follows the last event; `close` is called
        when no more events will be read, even if none was."""
        super().__init__()
        self._events, self._on_error, self._end, self._close = events, on_error, end, close
        self._start_headers = [*HEADERS, *((name.encode(), value.encode()) for name, value in (headers or {}).items())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(text: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode("utf-8", "replace"), "more_body": more})

        async def stream() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self._start_headers})
            async with aclosing(self._events) as events:  # type: ignore[type-var]
                try:
                    async for text in events:
                        await write(text)
                    await write(self._end, more=False)
                except ApiError as error:
                    await write(self._on_error(error) + self._end, more=False)
                except Exception as error:
                    log.exception("an answer broke off")
                    broken = ApiError(500, f"The answer broke off: {type(error).__name__}.")
                    await write(self._on_error(broken) + self._end, more=False)

        try:
            with suppress(ClientGone):
                await while_connected(receive, stream())
        finally:
            self._close()


async def while_connected(receive: Receive, answer: Awaitable[T]) -> T:
    """The answer; raises ClientGone as soon as the client disconnects."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, listening = asyncio.ensure_future(answer), asyncio.create_task(disconnected())
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


class Sendable(Protocol):
    async def whole(self) -> dict[str, Any]: ...

    def stream(self) -> AsyncIterator[str]: ...


async def respond(
    request: Request,
    submission: Submission,
    response: Sendable,
    streamed: bool | None,
    on_error: Callable[[ApiError], str],
    end: str = "",
) -> Response:
    """Sends `response` as a stream or as a whole. `on_error` makes the event for an error, `end` closes a stream."""
    headers = _omitted(submission.requests[0].omitted)
    if streamed:
        return EventStream(response.stream(), on_error, end, submission.close, headers)
    try:
        return JsonResponse(await while_connected(request.receive, response.whole()), headers=headers)
    finally:
        submission.close()


def _omitted(names: Sequence[str]) -> dict[str, str]:
    """The header that names the parts of the request that were left out, which are logged too."""
    if not names:
        return {}
    cleaned = dict.fromkeys(ODD.sub("_", name[:80]) for name in names)
    value = ",".join(list(cleaned)[:MOST_OMITTED])
    log.info("answered without %s, which cannot be offered here", value)
    return {OMITTED: value}
