"""uvicorn's protocol with limits on time: for a request's head, for its body, and for what a client does not read.

`guard.py` answers 408 when a body is late; what is here ends connections that would stay open all the same.
"""

import asyncio
import logging
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger("stoker.server")
NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
MOST_UNSENT, SEND_BUFFER = 16384, 1 << 17  # bytes the kernel keeps for a client: not yet sent, and in all
LOOK_S = 0.5  # how often a blocked write is looked at
SLOWEST = 16384  # bytes/s that a client must take to be waited for beyond the limit
GRACE_S = 5.0  # for the 408 of a late body to be read before the connection is closed
MOST_SCRAPS, SCRAP = 1000, 16  # a body may come in so many parts before they must have so many bytes on average


class PatientProtocol(H11Protocol):
    body_timeout = 30.0  # s for the head of a request, and again for its body
    stall_timeout = 30.0  # s that one answer may wait for its client to read, in all
    hurried_timeout = 5.0  # the same while others wait for the place of an answer that is not complete

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn: _Connection = _Connection(h11.SERVER, self.conn._max_incomplete_event_size)
        self._closing: asyncio.TimerHandle | None = None
        self._awaited: type[h11.IDLE] | type[h11.SEND_BODY] | None = None  # the state that `_closing` is for
        self._looking: asyncio.TimerHandle | None = None
        self._unread = _Unread()

    @staticmethod
    def others_wait() -> bool:
        """Whether a request waits for a place that another one holds."""
        return False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Without these, megabytes of an unread answer fit between here and the client before a write has to wait.
        transport.set_write_buffer_limits(high=0)
        bound = transport.get_extra_info("socket")
        if bound is not None and bound.family in (socket.AF_INET, socket.AF_INET6):
            bound.setsockopt(socket.IPPROTO_TCP, NOTSENT_LOWAT, MOST_UNSENT)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unread.spent = 0.0
        if self.conn.their_state is h11.SEND_BODY:  # of a request that had been sent ahead
            self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    # -- requests that do not arrive

    def _wait_for_request(self) -> None:
        """A clock runs from the connection, or from the first byte of another request, until the head is there, and
        another until the body is. How long a connection may rest between requests is uvicorn's keep-alive timeout."""
        state = self.conn.their_state
        if state is self._awaited:
            return
        self._stop_waiting()
        if state in (h11.IDLE, h11.SEND_BODY):
            limit = self.body_timeout + (GRACE_S if state is h11.SEND_BODY else 0.0)
            self._awaited = state
            self._closing = self.loop.call_later(limit, self.transport.close)

    def _stop_waiting(self) -> None:
        self._awaited = None
        if self._closing:
            self._closing.cancel()
            self._closing = None

    # -- answers that nobody reads

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.begin(self.loop.time(), self._taken)
        if self._looking is None:
            self._looking = self.loop.call_later(LOOK_S, self._look)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.end(self.loop.time(), self._taken)
        if self._looking:
            self._looking.cancel()
            self._looking = None

    def _look(self) -> None:
        self._looking = self.loop.call_later(LOOK_S, self._look)
        complete = self.cycle is None or self.cycle.response_complete
        hurried = not complete and self.others_wait()
        limit = min(self.stall_timeout, self.hurried_timeout) if hurried else self.stall_timeout
        if self._unread.waited(self.loop.time(), self._taken) > limit:
            log.warning("a client did not read its answer for %.0f s and was let go", limit)
            self.transport.abort()

    @property
    def _taken(self) -> int:
        """Bytes that the kernel took of all that was sent."""
        return self.conn.sent - self.transport.get_write_buffer_size()


class _Unread:
    """How long an answer has waited for its client to read, less the time that what it did read may have taken."""

    def __init__(self) -> None:
        self.spent = 0.0
        self._began: float | None = None  # the wait under way, if one is
        self._taken = 0

    def begin(self, now: float, taken: int) -> None:
        self.end(now, taken)
        self._began = now

    def waited(self, now: float, taken: int) -> float:
        waiting = 0.0 if self._began is None else now - self._began
        return max(0.0, self.spent + waiting - (taken - self._taken) / SLOWEST)

    def end(self, now: float, taken: int) -> None:
        self.spent = self.waited(now, taken)
        self._began, self._taken = None, taken


class _Connection(h11.Connection):
    """Refuses bodies that come in scraps. Each part costs as much as a large one, and a client could keep the server
    busy for seconds with parts of one byte."""

    def __init__(self, role: Any, most_incomplete: int) -> None:
        super().__init__(role, most_incomplete)
        self._parts = self._bytes = 0
        self.sent = 0  # bytes

    def send(self, event: Any) -> Any:
        data = super().send(event)
        self.sent += len(data or b"")
        return data

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._parts, self._bytes = self._parts + 1, self._bytes + len(event.data)
            if self._parts > MOST_SCRAPS and self._bytes < SCRAP * self._parts:
                raise h11.RemoteProtocolError(f"{self._parts} parts of a body have {self._bytes} bytes in all")
        elif isinstance(event, h11.Request):
            self._parts = self._bytes = 0
        return event
