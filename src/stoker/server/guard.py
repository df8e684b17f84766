"""ASGI middleware in front of every endpoint: host, origin and API key, and limits on a body's size and time.

It is plain ASGI rather than Starlette's BaseHTTPMiddleware so that streams pass through untouched.
"""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import json
import socket
from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker.server.config import MIB, ServerConfig
from stoker.server.errors import ApiError

OPEN_PATHS = ("/health",)
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # methods without side effects
LINGER_S, LINGER_BYTES = 2.0, 64 * MIB  # how long, and how much, is still read from a client after it was refused


class Guard:
    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app, self._config, self._loopback = app, config, config.loopback
        self._digest = _digest(config.api_key) if config.api_key else None
        self._names = {name.lower().strip("[]") for name in (*LOCAL_NAMES, config.host, *config.allowed_hosts)}
        if not self._loopback:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        self._origins = {origin.lower() for origin in config.cors_origins}
        # It answers preflight requests, which have no key, and adds its headers to every response.
        self._handler: ASGIApp = self._handle
        if config.cors_origins:
            self._handler = CORSMiddleware(
                self._handle,
                allow_origins=config.cors_origins,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                max_age=600,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "this server has no WebSockets"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_host(dict(scope["headers"]))
        except ApiError as error:
            await refuse(error, scope["path"], send)
        else:
            await self._handler(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        body = _LimitedBody(receive, self._config)

        async def send_when_read(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            if message["type"] == "http.response.body" and not message.get("more_body") and not body.complete:
                await send({**message, "more_body": True})
                await body.discard()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        try:
            headers = dict(scope["headers"])
            self._check_origin(scope["method"], headers)
            self._check_key(scope["path"], headers)
            self._check_length(headers)
            if scope["method"] not in SAFE_METHODS:  # every body is read as JSON, whatever its content type says
                others = [entry for entry in scope["headers"] if entry[0] != b"content-type"]
                scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
            await self._app(scope, body, send_when_read)
        except ApiError as error:
            if not started:
                await refuse(error, scope["path"], send_when_read)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Refuses unknown host names: a web page could otherwise reach a local server by DNS rebinding."""
        host = headers.get(b"host", b"").decode("latin-1").strip().lower()
        if not host or self._is_ours(_host_name(host)) or (self._digest and not self._loopback):
            return
        raise ApiError(
            403,
            f"This server was asked for by the name {host[:100]!r}, which it does not know. Use its address, or start "
            f"it with --allowed-host {_host_name(host)[:100]}.",
        )

    def _is_ours(self, name: str) -> bool:
        """Whether a host name is ours. A server that listens beyond loopback accepts any IP address as well, because
        DNS rebinding needs a name."""
        return name in self._names or (not self._loopback and _is_address(name))

    def _check_origin(self, method: str, headers: dict[bytes, bytes]) -> None:
        """Refuses requests from pages of other sites. A browser sends a preflight before JSON, but none before plain
        text and forms, whose bodies are read as JSON here too."""
        if method in SAFE_METHODS or "*" in self._origins:
            return
        origin = headers.get(b"origin", b"").decode("latin-1").strip().lower()
        site = headers.get(b"sec-fetch-site", b"").decode("latin-1").strip().lower()
        if origin in self._origins:
            return
        if origin:
            try:
                found = urlsplit(origin)
                name = found.hostname or ""
            except ValueError:
                found, name = urlsplit(""), ""
            host = headers.get(b"host", b"").decode("latin-1").strip().lower()
            ours = found.netloc == host or name in map(str.lower, self._config.allowed_hosts)
        else:
            ours = site in ("", "none", "same-origin")
        if not ours:
            where = f"the page {origin[:100]!r}" if origin else "another site's page"
            raise ApiError(
                403, f"The request comes from {where}, which may not use this server. Allow it with --cors-origin."
            )

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._digest is None or path in OPEN_PATHS:
            return
        # Digests of equal length are compared in constant time, so timing reveals nothing of the key.
        if not any(hmac.compare_digest(_digest(key), self._digest) for key in _keys(headers)):
            raise ApiError(
                401,
                "The API key is missing or wrong. Send it as Authorization: Bearer KEY or x-api-key: KEY.",
                code="invalid_api_key",
            )

    def _check_length(self, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._config.max_body:
            raise too_large(int(length[:20]), self._config.max_body)


class _LimitedBody:
    """The receive channel of a request, with limits on the size and the arrival time of its body."""

    def __init__(self, receive: Receive, config: ServerConfig) -> None:
        self._receive, self._config = receive, config
        self._bytes, self.complete = 0, False
        self._until = asyncio.get_running_loop().time() + config.body_timeout

    async def __call__(self) -> Message:
        if self.complete:
            return await self._receive()  # only a disconnect can follow
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._next()
        except TimeoutError:
            raise ApiError(
                408, f"The request did not arrive within {self._config.body_timeout:,.0f} s; {self._bytes:,} bytes did."
            ) from None
        if self._bytes > self._config.max_body:
            raise too_large(self._bytes, self._config.max_body)
        return message

    async def discard(self) -> None:
        """Reads what the client still sends after its answer (lingering close). To close a connection with unread
        bytes resets it, and a reset can destroy the answer before the client has read it."""
        limit = self._bytes + LINGER_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while not self.complete and self._bytes < limit:
                    await self._next()

    async def _next(self) -> Message:
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        self.complete = not message.get("more_body", False)  # nothing follows a disconnect either
        return message


def _host_name(host: str) -> str:
    """A host header without its port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def too_large(found: int, limit: int) -> ApiError:
    return ApiError(413, f"The request has {found:,} bytes or more, and at most {limit:,} are taken (--max-body).")


async def refuse(error: ApiError, path: str, send: Send) -> None:
    body = json.dumps(error.body(path)).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _keys(headers: dict[bytes, bytes]) -> Iterable[bytes]:
    """The keys of a request, wherever clients put one: Anthropic's header, OpenAI's, and HTTP Basic of a browser."""
    if b"x-api-key" in headers:
        yield headers[b"x-api-key"]
    kind, _, value = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"bearer":
        yield value.strip()
    elif kind.lower() == b"basic":
        try:
            yield base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return


def _digest(key: str | bytes) -> bytes:
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()
