"""The timed HTTP client: a request and its streamed answer, each piece with the time it arrived.

aiohttp speaks HTTP. Nothing beyond HTTP's framing is parsed while a request runs: `events` reads server-sent events out
of the pieces once the round is over. A piece is stamped when aiohttp hands it over, one turn of the event loop after
the socket was read (benchmarks/server/bench_client.py says how late that is).
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp.http import HttpProcessingError

Clock = Callable[[], float]
CLOSED = "the server closed the connection before the end of its answer"
CONNECT_TIMEOUT = 60.0
DONE = "[DONE]"
HEADERS = {
    "Content-Type": "application/json",
    "Accept": "text/event-stream",
    "Accept-Encoding": "identity",  # a compressed stream would arrive in batches
    "User-Agent": "stoker-bench",
}


@dataclass
class Exchange:
    """A request as the client saw it. Times are readings of one clock."""

    sent: float = 0.0  # just before the request was written to an open connection
    ended: float = 0.0
    status: int = 0  # 0: no response came
    failure: str = ""  # connection, timeout, closed early or malformed, if the response did not come to its end
    reason: str = ""  # and a sentence about it
    reused: bool = False  # the connection had served a request before
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # arrival and payload, without HTTP's framing

    @property
    def body(self) -> bytes:
        return b"".join(payload for _, payload in self.pieces)


def open_session(clock: Clock, headers: dict[str, str], timeout: float) -> aiohttp.ClientSession:
    """A session without limits, cookies or proxies. Enter it inside a running event loop."""

    async def sending(_: aiohttp.ClientSession, context: SimpleNamespace, __: Any) -> None:
        if isinstance(context.trace_request_ctx, Exchange):
            context.trace_request_ctx.sent = clock()

    async def reusing(_: aiohttp.ClientSession, context: SimpleNamespace, __: Any) -> None:
        if isinstance(context.trace_request_ctx, Exchange):
            context.trace_request_ctx.reused = True

    trace = aiohttp.TraceConfig()
    trace.on_request_headers_sent.append(sending)  # called before the headers are written
    trace.on_connection_reuseconn.append(reusing)
    return aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=timeout),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=timeout),
        trace_configs=[trace],
    )


async def open_connections(session: aiohttp.ClientSession, url: str, count: int) -> None:
    """Leave this many connections idle: requests that run at the same time take one each. Any answer will do."""

    async def knock() -> None:
        async with session.get(url) as response:
            await response.read()

    await asyncio.gather(*(knock() for _ in range(count)))


async def timed_post(session: aiohttp.ClientSession, url: str, body: bytes, clock: Clock, timeout: float) -> Exchange:
    """A timed request. Never raises for what a server does; gives up when no byte has come for `timeout` seconds."""
    while True:
        exchange = Exchange()
        await _post(session, url, body, clock, timeout, exchange)
        if exchange.failure == "closed early" and not exchange.status and exchange.reused:
            continue  # an idle connection that the server had closed; it never saw the request
        exchange.sent = exchange.sent or exchange.ended
        return exchange


async def _post(
    session: aiohttp.ClientSession, url: str, body: bytes, clock: Clock, timeout: float, exchange: Exchange
) -> None:
    limits = aiohttp.ClientTimeout(total=None, sock_connect=min(timeout, CONNECT_TIMEOUT), sock_read=timeout)
    try:
        async with session.post(
            url, data=body, headers=HEADERS, timeout=limits, allow_redirects=False, trace_request_ctx=exchange
        ) as response:
            exchange.status = response.status
            async for data in response.content.iter_any():
                exchange.pieces.append((clock(), data))
        exchange.ended = exchange.pieces[-1][0] if exchange.pieces else clock()
        return
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        exchange.failure, exchange.reason = "connection", f"no connection to {url}: {error}"
    except TimeoutError:
        exchange.failure, exchange.reason = "timeout", f"nothing arrived for {timeout:g} s"
    except (aiohttp.ClientResponseError, HttpProcessingError) as error:
        exchange.failure = "malformed"
        exchange.reason = f"what arrived is no HTTP: {' '.join(error.message.split())}"
    except (aiohttp.ClientError, OSError):
        exchange.failure, exchange.reason = "closed early", CLOSED
    exchange.ended = clock()


def events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """(arrival, data) of each server-sent event, with the time of the byte that completed it.

    Comments and other fields are dropped, several data lines are joined.
    """
    rest = b""
    data: list[str] = []
    last = 0.0
    for at, piece in pieces:
        last = at
        *lines, rest = (rest + piece).split(b"\n")
        for raw in lines:
            line = raw.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
            elif not line and data:
                yield at, "\n".join(data)
                data = []
    if rest.startswith(b"data:"):
        data.append(rest[5:].strip().decode("utf-8", "replace"))
    if data:  # a stream that ends without the empty line
        yield last, "\n".join(data)


def json_events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any] | None]]:
    """Events as JSON objects; None stands for [DONE]. Raises ValueError where an event is no JSON object."""
    for at, data in events(pieces):
        if data.strip() == DONE:
            yield at, None
            continue
        found = json.loads(data)
        if not isinstance(found, dict):
            raise ValueError(f"an event that is no JSON object: {data[:80]}")
        yield at, found
