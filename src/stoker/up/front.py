"""The public address of a service: a reverse proxy that streams, and answers 503 while no engine serves.

Nothing is buffered beyond what a slow reader leaves behind, and bodies and headers pass as they are; only headers
about one connection (hop-by-hop) stay behind. A client that leaves closes its request to the engine, too.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, hdrs, web
from aiohttp.http import SERVER_SOFTWARE
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

log = logging.getLogger("stoker.up")

HOP_BY_HOP = frozenset(
    name.lower()
    for name in (
        *("Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection"),
        *("TE", "Trailer", "Transfer-Encoding", "Upgrade", "Expect"),
    )
)
# aiohttp adds these to a request that has none.
AUTOMATIC = (hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE)
RETRY_S = 5  # of clients, if nobody knows better
HEAD = 65536  # bytes of the longest header
IDLE_S = 75.0  # that a connection may stay without a whole header of a request
SWEEP_S = 5.0
EVENTS = "text/event-stream"


@dataclass(eq=False)
class Backend:
    """An engine that answers requests."""

    address: str
    open: set["Passing"] = field(default_factory=set)
    answered: int = 0  # requests that ended well
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def waiting(self) -> int:
        """Requests that wait for the engine, and not for their client to send or to read."""
        return sum(each.waits for each in self.open)

    async def drain(self, timeout: float) -> None:
        """Waits for the requests that it has begun."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.idle.wait()


@dataclass(eq=False)
class Passing:
    """A request on its way through."""

    waits: bool = False  # for the engine


class Front:
    def __init__(self, why: Callable[[], tuple[str, int]]) -> None:
        """`why` says, while there is no backend, what is going on, and after how many seconds to ask again."""
        self._why = why
        self.backend: Backend | None = None  # of new requests; those under way stay with theirs
        self._session: ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._busy: set[object] = set()  # connections with a request

    async def listen(self, host: str, port: int) -> int:
        """Raises OSError if the port is taken. Returns the port, for 0 the one that was free."""
        # Every request has a connection of its own: the engine might close one that is kept just when it is used.
        self._session = ClientSession(
            connector=TCPConnector(limit=0, force_close=True),
            timeout=ClientTimeout(total=None, sock_connect=10.0),
            auto_decompress=False,
            skip_auto_headers=AUTOMATIC,
            max_line_size=HEAD,
            max_field_size=HEAD,
        )
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        app.on_response_prepare.append(_no_server)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            keepalive_timeout=IDLE_S,
            shutdown_timeout=2.0,
            max_line_size=HEAD,
            max_field_size=HEAD,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=1024)
        await site.start()
        self._sweeping = asyncio.create_task(self._sweep())
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        if self._sweeping:
            self._sweeping.cancel()
        if self._runner:
            await self._runner.cleanup()
        if self._session:
            await self._session.close()

    async def _sweep(self) -> None:
        """Closes connections on which no request arrives: aiohttp waits for the header of the first one for ever."""
        assert self._runner
        idle_since: dict[object, float] = {}
        while True:
            await asyncio.sleep(SWEEP_S)
            now = asyncio.get_running_loop().time()
            server = self._runner.server
            idle = [each for each in (server.connections if server else []) if each not in self._busy]
            idle_since = {each: idle_since.get(each, now) for each in idle}
            for each in idle:
                if now - idle_since[each] > IDLE_S:
                    each.force_close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self._busy.add(request.protocol)
        try:
            return await self._answer(request)
        finally:
            self._busy.discard(request.protocol)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        backend = self.backend
        if backend is None:
            return self._unavailable(request, *self._why())
        passing = Passing()
        backend.open.add(passing)
        backend.idle.clear()
        try:
            return await self._pass(request, backend, passing)
        finally:
            backend.open.discard(passing)
            if not backend.open:
                backend.idle.set()

    async def _pass(self, request: web.Request, backend: Backend, passing: Passing) -> web.StreamResponse:
        assert self._session
        path = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs
        asks = request.method == hdrs.METH_POST  # only these may keep an engine busy
        passing.waits = asks
        body = _body(request, passing, asks) if request.body_exists else None
        response: web.StreamResponse | None = None
        tail = b""
        try:
            async with self._session.request(
                request.method,
                URL(backend.address + path, encoded=True),
                headers=_end_to_end(request.headers),
                data=body,
                allow_redirects=False,
            ) as answer:
                response = _begin(answer)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    passing.waits = False
                    await response.write(chunk)
                    tail = (tail[-1:] + chunk[-2:])[-2:]
                    passing.waits = asks
                await response.write_eof()
                backend.answered += asks and answer.status == 200
                return response
        except (ClientError, OSError) as error:
            passing.waits = False
            if request.transport is None or request.transport.is_closing():
                raise asyncio.CancelledError from None  # it was the client that left
            if response is None or not response.prepared:
                return self._unavailable(request, "The engine ended while it worked on this request.", RETRY_S)
            await _cut(request, response, tail, error)
            return response

    def _unavailable(self, request: web.Request, message: str, retry_s: int) -> web.Response:
        body = json.dumps(error_body(request.path, message)).encode()
        response = web.Response(
            status=503, body=body, content_type="application/json", headers={hdrs.RETRY_AFTER: str(max(1, retry_s))}
        )
        if request.body_exists:
            response.force_close()
        return response


def error_body(path: str, message: str) -> dict[str, object]:
    """In the form of the API that the path belongs to."""
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": "overloaded_error", "message": message}}
    return {"error": {"message": message, "type": "server_error", "param": None, "code": "not_ready"}}


def _end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """All but those about the connection, which the connection header may name too."""
    named = {name.strip().lower() for line in headers.getall(hdrs.CONNECTION, ()) for name in line.split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in HOP_BY_HOP | named)


async def _no_server(request: web.Request, response: web.StreamResponse) -> None:
    """aiohttp would name itself; what the engine says of itself passes."""
    if response.headers.get(hdrs.SERVER) == SERVER_SOFTWARE:
        del response.headers[hdrs.SERVER]


def _begin(answer: ClientResponse) -> web.StreamResponse:
    return web.StreamResponse(status=answer.status, reason=answer.reason, headers=_end_to_end(answer.headers))


async def _body(request: web.Request, passing: Passing, asks: bool) -> AsyncIterator[bytes]:
    """Of the request, as it arrives. While it does, it is the client that everyone waits for."""
    passing.waits = False
    async for chunk in request.content.iter_any():
        yield chunk
    passing.waits = asks


async def _cut(request: web.Request, response: web.StreamResponse, tail: bytes, error: Exception) -> None:
    """The engine ended within an answer. A stream gets an error as its last event; anything else is broken off."""
    log.warning("an answer was cut off: %s", error or type(error).__name__)
    if response.headers.get(hdrs.CONTENT_TYPE, "").startswith(EVENTS):
        body = json.dumps(error_body(request.path, "The engine ended within this answer. Ask again."))
        name = "event: error\n" if request.path.startswith("/v1/messages") else ""
        between = "" if tail == b"\n\n" else "\n\n"
        with suppress(ConnectionError, RuntimeError):
            await response.write(f"{between}{name}data: {body}\n\n".encode())
            await response.write_eof()
    elif request.transport:
        request.transport.abort()
