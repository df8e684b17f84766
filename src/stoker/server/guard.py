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
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker.server.config import MIB, ServerConfig
from stoker.server.errors import ApiError

OPEN_PATHS = ("/health",)
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
LINGER_S, LINGER_BYTES = 2.0, 64 * MIB  # how much longer a refused client is listened to


class Guard:
    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app, self._config = app, config
        self._digest = _digest(config.api_key) if config.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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
            self._check_host(headers)
            self._check_key(scope["path"], headers)
            self._check_length(headers)
            await self._app(scope, body, watched)
        except ApiError as error:
            if not started:
                await refuse(error, scope["path"], watched)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """A web page could otherwise reach a server on this machine through a name of its own (DNS rebinding)."""
        if not self._config.loopback:
            return
        host = headers.get(b"host", b"").decode("latin-1").strip().lower()
        name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
        if host and name not in LOCAL_NAMES and name != self._config.host:
            raise ApiError(403, f"This server answers on {self._config.host} only, and was asked for {host[:100]!r}.")

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

    async def __call__(self) -> Message:
        if self.complete:
            return await self._receive()  # only a disconnect can come
        try:
            message = await asyncio.wait_for(self._next(), self._config.body_timeout)
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
