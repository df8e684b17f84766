"""uvicorn protocol with a request-header timeout, a request-body timeout and a timeout for clients that do not read.

uvicorn itself has a keep-alive timeout only. `guard.py` answers 408 when a body is late; this protocol closes the
connections that would stay open all the same.
"""

import asyncio
import logging
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger("stoker.server")
NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
MAX_UNSENT, SEND_BUFFER = 16384, 1 << 17  # bytes the kernel buffers for a client: not yet sent, and in total
CHECK_S = 0.5  # how often a blocked write is checked
LEAST_RATE = 16384  # bytes/s that a client must read to be waited for beyond the limit
GRACE_S = 5.0  # for the 408 of a late body to be read before the connection is closed
MAX_CHUNKS, LEAST_CHUNK = 1000, 16  # a body may have so many chunks before they must have so many bytes on average


class TimeoutProtocol(H11Protocol):
    body_timeout = 30.0  # s for the header of a request, and again for its body
    stall_timeout = 30.0  # s in total that one answer waits for its client to read
    busy_stall_timeout = 5.0  # the same while other requests wait for the slot of an incomplete answer

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn: _Connection = _Connection(h11.SERVER, self.conn._max_incomplete_event_size)
        self._closing: asyncio.TimerHandle | None = None
        self._awaited: type[h11.IDLE] | type[h11.SEND_BODY] | None = None  # the state whose timeout `_closing` is
        self._checking: asyncio.TimerHandle | None = None
        self._read_clock = _ReadClock()

    @staticmethod
    def requests_queued() -> bool:
        """Whether requests are queued for a slot."""
        return False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Without these limits, buffers hold megabytes of an unread answer before a write has to wait.
        transport.set_write_buffer_limits(high=0)
        bound = transport.get_extra_info("socket")
        if bound is not None and bound.family in (socket.AF_INET, socket.AF_INET6):
            bound.setsockopt(socket.IPPROTO_TCP, NOTSENT_LOWAT, MAX_UNSENT)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._start_timeout()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._start_timeout()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._read_clock.spent = 0.0
        if self.conn.their_state is h11.SEND_BODY:  # of a pipelined request
            self._start_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timeout()
        self.resume_writing()
        super().connection_lost(exc)

    # -- request-header and body timeouts

    def _start_timeout(self) -> None:
        """Starts the header timeout with the connection, or with the first byte of a further request, and the body
        timeout once the header is complete. Between requests, uvicorn's keep-alive timeout applies."""
        state = self.conn.their_state
        if state is self._awaited:
            return
        self._stop_timeout()
        if state in (h11.IDLE, h11.SEND_BODY):
            limit = self.body_timeout + (GRACE_S if state is h11.SEND_BODY else 0.0)
            self._awaited = state
            self._closing = self.loop.call_later(limit, self.transport.close)

    def _stop_timeout(self) -> None:
        self._awaited = None
        if self._closing:
            self._closing.cancel()
            self._closing = None

    # -- clients that do not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_clock.begin(self.loop.time(), self._accepted)
        if self._checking is None:
            self._checking = self.loop.call_later(CHECK_S, self._check_reader)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_clock.end(self.loop.time(), self._accepted)
        if self._checking:
            self._checking.cancel()
            self._checking = None

    def _check_reader(self) -> None:
        self._checking = self.loop.call_later(CHECK_S, self._check_reader)
        complete = self.cycle is None or self.cycle.response_complete
        busy = not complete and self.requests_queued()
        limit = min(self.stall_timeout, self.busy_stall_timeout) if busy else self.stall_timeout
        if self._read_clock.waited(self.loop.time(), self._accepted) > limit:
            log.warning("a client did not read its answer for %.0f s and was disconnected", limit)
            self.transport.abort()

    @property
    def _accepted(self) -> int:
        """Bytes of all that was sent that the kernel has accepted."""
        return self.conn.sent - self.transport.get_write_buffer_size()


class _ReadClock:
    """How long an answer has waited for its client, minus the time allowed for the bytes that it did read."""

    def __init__(self) -> None:
        self.spent = 0.0
        self._began: float | None = None  # start of the current wait, if there is one
        self._accepted = 0

    def begin(self, now: float, taken: int) -> None:
        self.end(now, taken)
        self._began = now

    def waited(self, now: float, taken: int) -> float:
        waiting = 0.0 if self._began is None else now - self._began
        return max(0.0, self.spent + waiting - (taken - self._accepted) / LEAST_RATE)

    def end(self, now: float, taken: int) -> None:
        self.spent = self.waited(now, taken)
        self._began, self._accepted = None, taken


class _Connection(h11.Connection):
    """Counts sent bytes, and refuses bodies in many tiny chunks. A chunk costs the same whatever its size, so a client
    could keep the server busy for seconds with chunks of one byte."""

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
            if self._parts > MAX_CHUNKS and self._bytes < LEAST_CHUNK * self._parts:
                raise h11.RemoteProtocolError(f"{self._parts} parts of a body have {self._bytes} bytes in all")
        elif isinstance(event, h11.Request):
            self._parts = self._bytes = 0
        return event
