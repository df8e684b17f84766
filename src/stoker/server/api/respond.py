"""Sending a response whole or as a stream; either way the engine is free of it when nobody reads any more."""

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import JSONResponse, Response

from stoker.server.errors import ApiError
from stoker.server.service import Begun, Service
from stoker.server.streaming import EventStream, while_connected


class Sendable(Protocol):
    async def whole(self) -> dict[str, Any]: ...

    def stream(self) -> AsyncIterator[str]: ...


async def respond(
    request: Request,
    service: Service,
    begun: Begun,
    response: Sendable,
    streamed: bool | None,
    on_error: Callable[[ApiError], str],
    end: str = "",
) -> Response:
    """`on_error` is the event for an error in a stream, `end` what closes one."""
    if streamed:
        return EventStream(response.stream(), on_error, service.config.stall_timeout, end, begun.close)
    try:
        return JSONResponse(await while_connected(request, response.whole()))
    finally:
        begun.close()
