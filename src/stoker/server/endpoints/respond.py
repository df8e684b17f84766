"""Sending a response whole or as a stream; either way the engine is free of it when nobody reads any more."""

import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from stoker.server.errors import ApiError
from stoker.server.lifecycle.service import Begun, Service
from stoker.server.streaming import EventStream, JsonResponse, while_connected

log = logging.getLogger("stoker.server")
OMITTED = "x-stoker-omitted"
MOST_OMITTED = 32  # names in that header; more than any client offers, and far from the limits of proxies
ODD = re.compile(r"[^\w.:/-]", re.ASCII)  # names come from clients, and a header is one line of ASCII


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
    headers = _omitted(begun.asks[0].omitted)
    if streamed:
        return EventStream(response.stream(), on_error, end, begun.close, headers)
    try:
        return JsonResponse(await while_connected(request, response.whole()), headers=headers)
    finally:
        begun.close()


def _omitted(names: Sequence[str]) -> dict[str, str]:
    """The header that says which parts of the request were left out; the log says it too."""
    if not names:
        return {}
    cleaned = dict.fromkeys(ODD.sub("_", name[:80]) for name in names)
    value = ",".join(list(cleaned)[:MOST_OMITTED])
    log.info("answered without %s, which cannot be offered here", value)
    return {OMITTED: value}
