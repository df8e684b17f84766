"""A connection that never finishes asking does not stay open: uvicorn's protocol with a limit on how long the head of
a request may take. Bodies have their own limit in `guard.py`."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientProtocol(H11Protocol):
    head_timeout = 30.0  # s

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        """The clock starts with a connection, or with the first byte of another request, and stops when the head is
        there; how long a connection may rest between requests is uvicorn's keep-alive timeout."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._closing is None:
            self._closing = self.loop.call_later(self.head_timeout, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._closing:
            self._closing.cancel()
            self._closing = None
