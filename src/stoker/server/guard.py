"""What stands in front of every endpoint: who may come in, how much may be sent, and how long that may take.

Plain ASGI, so that streams pass through untouched.
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
READING = ("GET", "HEAD", "OPTIONS")  # methods that change nothing and compute nothing
LINGER_S, LINGER_BYTES = 2.0, 64 * MIB  # how much longer a refused client is listened to


class Guard:
    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app, self._config = app, config
        self._digest = _digest(config.api_key) if config.api_key else None
        self._names = {name.lower().strip("[]") for name in (*LOCAL_NAMES, config.host, *config.allowed_hosts)}
        if not config.loopback:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        self._origins = {origin.lower() for origin in config.cors_origins}
        # it answers a browser's question before a request (which has no key) and adds its headers to every response
        self._checked: ASGIApp = self._check
        if config.cors_origins:
            self._checked = CORSMiddleware(
                self._check,
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
            await self._checked(scope, receive, send)

    async def _check(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        body = _Body(receive, self._config)

        async def watched(message: Message) -> None:
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
            if scope["method"] not in READING:  # every body is JSON, whatever its client calls it
                others = [entry for entry in scope["headers"] if entry[0] != b"content-type"]
                scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
            await self._app(scope, body, watched)
        except ApiError as error:
            if not started:
                await refuse(error, scope["path"], watched)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """A web page could otherwise reach a server on this machine through a name of its own (DNS rebinding)."""
        host = headers.get(b"host", b"").decode("latin-1").strip().lower()
        if not host or self._known(_name(host)) or (self._digest and not self._config.loopback):
            return
        raise ApiError(
            403,
            f"This server was asked for by the name {host[:100]!r}, which it does not know. Use its address, or start "
            f"it with --allowed-host {_name(host)[:100]}.",
        )

    def _known(self, name: str) -> bool:
        """Our own names. An address is one too where the server listens on more than its own: only names can be made
        to lead to somewhere else."""
        return name in self._names or (not self._config.loopback and _is_address(name))

    def _check_origin(self, method: str, headers: dict[bytes, bytes]) -> None:
        """Pages of other sites may not make a browser compute here. A browser asks first before it sends JSON, but
        sends plain text and forms without asking, and their bodies are read as JSON too."""
        if method in READING or "*" in self._origins:
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
        # digests of equal length, compared in constant time: nothing of the key can be learnt by measuring
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


class _Body:
    """A request's body, as far as it is allowed to go."""

    def __init__(self, receive: Receive, config: ServerConfig) -> None:
        self._receive, self._config = receive, config
        self._bytes, self.complete = 0, False
        self._until = asyncio.get_running_loop().time() + config.body_timeout

    async def __call__(self) -> Message:
        if self.complete:
            return await self._receive()  # only a disconnect can come
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
        """Reads what the client still sends after its answer. Closing a connection over unread bytes resets it, and a
        reset can destroy the answer before the client has read it."""
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


def _name(host: str) -> str:
    """Without the port."""
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
    """Wherever clients put a key: OpenAI's header, Anthropic's, and a browser's password box."""
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
