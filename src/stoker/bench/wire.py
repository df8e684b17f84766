"""HTTP/1.1 for streams that are timed: bytes get the time of their arrival, and are read only when the answer is whole.

A client library that wakes a coroutine per chunk takes more CPU at 20,000 chunks/s and stamps them twice as late
(benchmarks/server/bench_client.py). Everything that is not timed goes through aiohttp.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import SplitResult

Clock = Callable[[], float]
MAX_HEADER_BYTES = 1 << 16
LAST = b"\n\n\r\n0\r\n\r\n"  # an event, the end of its chunk, the chunk of no bytes: nothing else looks like this
CLOSED = "the server closed the connection before the end of its answer"


@dataclass
class Exchange:
    """A request as the wire saw it. Times are readings of one clock."""

    sent: float  # just before the request was written to an open connection
    ended: float = 0.0
    broken: str = ""  # why the response did not come to its end
    arrivals: list[tuple[float, bytes]] = field(default_factory=list)  # as they came
    framing: "Framing" = field(default_factory=lambda: Framing())
    _pieces: list[tuple[float, bytes]] = field(default_factory=list)
    _read: int = 0  # arrivals that went through framing

    @property
    def status(self) -> int:
        """0: no response came."""
        return self.framing.status

    @property
    def pieces(self) -> list[tuple[float, bytes]]:
        """Arrival and payload, without HTTP's framing."""
        self.look()
        return self._pieces

    @property
    def body(self) -> bytes:
        return b"".join(payload for _, payload in self.pieces)

    def look(self) -> None:
        """Take apart what has arrived. Left until nothing is timed any more, wherever that can wait."""
        try:
            while self._read < len(self.arrivals):
                at, data = self.arrivals[self._read]
                self._read += 1
                payload = self.framing.feed(data)
                if payload:
                    self._pieces.append((at, payload))
        except ValueError as error:
            self.broken = self.broken or f"what arrived is no HTTP: {error}"


class Framing:
    """Takes a response apart: header, then a body that is chunked, of known length, or ends with the connection."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self.until_close = False
        self._buffer = bytearray()
        self._left = -1  # of the current chunk or of the body; -1: a size line (or the header) comes next
        self.chunked = False
        self._trailer = False

    def feed(self, data: bytes) -> bytes:
        """The payload in these bytes."""
        self._buffer += data
        if not self.status and not self._read_header():
            return b""
        if self.chunked:
            return self._feed_chunks()
        if self.until_close:
            return self._take(len(self._buffer))
        payload = self._take(self._left)
        self._left -= len(payload)
        self.done = self._left == 0
        return payload

    @property
    def keeps_open(self) -> bool:
        return self.done and not self.until_close and self.headers.get("connection", "").lower() != "close"

    def _read_header(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEADER_BYTES:
                raise ValueError(f"a response header of more than {MAX_HEADER_BYTES:,} bytes")
            return False
        first, *lines = self._take(end + 4)[:-4].decode("latin-1").split("\r\n")
        parts = first.split(" ", 2)
        if not parts[0].startswith("HTTP/1.") or len(parts) < 2 or not parts[1].isdigit():
            raise ValueError(f"not an HTTP/1 response: {first[:60]!r}")
        self.status = int(parts[1])
        if 100 <= self.status < 200:  # 100 Continue: the answer is still to come
            self.status = 0
            return self._read_header()
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self.chunked = self.headers.get("transfer-encoding", "").lower().endswith("chunked")
        if not self.chunked:
            length = self.headers.get("content-length", "")
            self.until_close = not length.isdigit()
            self._left = int(length) if length.isdigit() else -1
            self.done = self._left == 0
        return True

    def _feed_chunks(self) -> bytes:
        out = bytearray()
        while not self.done:
            if self._left > 0:
                payload = self._take(self._left)
                if not payload:
                    break
                out += payload
                self._left -= len(payload)
                continue
            end = self._buffer.find(b"\r\n")
            if end < 0:
                break
            line = self._take(end + 2)[:-2]
            if self._left == 0:  # what follows the bytes of a chunk
                self._left = -1
            elif self._trailer:
                self.done = not line
            else:
                self._left = int(line.split(b";")[0], 16)
                if self._left == 0:
                    self._trailer, self._left = True, -1
        return bytes(out)

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken


class Wire(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._exchange = Exchange(0.0)
        self._finished: asyncio.Future[None] | None = None
        self.reusable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        exchange.arrivals.append((self._clock(), data))
        if data.endswith(LAST) and exchange.framing.chunked:
            # Streams that end together would delay each other's stamps if each were taken apart now.
            self._end("", "close" not in exchange.framing.headers.get("connection", "").lower())
        elif not exchange.framing.chunked or data.endswith(b"\r\n\r\n"):
            # Other endings, and whatever looks like one; bodies that are not chunked are short.
            self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._finished is None or self._finished.done():
            return
        self._look()
        framing = self._exchange.framing
        clean = framing.until_close and exc is None
        self._end("" if clean or framing.done else CLOSED, False)

    async def ask(self, request: bytes, patience: float) -> Exchange:
        """Send, and wait for the whole answer; gives up when no byte has come for `patience` seconds."""
        if self._transport is None:
            raise ConnectionError("not connected")
        loop = asyncio.get_running_loop()
        self._finished = loop.create_future()
        self._exchange = exchange = Exchange(self._clock())
        self._transport.write(request)
        newest, waited_from = 0, loop.time()
        while not self._finished.done():
            try:
                await asyncio.wait({self._finished}, timeout=min(1.0, patience))
            except asyncio.CancelledError:
                self.close()
                raise
            if len(exchange.arrivals) > newest:
                newest, waited_from = len(exchange.arrivals), loop.time()
            elif not self._finished.done() and loop.time() - waited_from >= patience:
                self._end(f"nothing arrived for {patience:g} s", False)
        return exchange

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.close()

    def _look(self) -> None:
        exchange = self._exchange
        exchange.look()
        if exchange.framing.done or exchange.broken:
            self._end(exchange.broken, exchange.framing.keeps_open)

    def _end(self, broken: str, reusable: bool) -> None:
        if self._finished is None or self._finished.done():
            return
        exchange = self._exchange
        exchange.ended = exchange.arrivals[-1][0] if exchange.arrivals and not broken else self._clock()
        exchange.broken = broken
        self._finished.set_result(None)
        if not reusable:
            self.close()


class Wires:
    """Open connections to one server. A request gets one that is open already: connecting is no part of its times."""

    def __init__(self, at: SplitResult, clock: Clock, headers: dict[str, str]) -> None:
        self._host, self._clock = at.hostname or "", clock
        self._ssl = ssl.create_default_context() if at.scheme == "https" else None
        self._port = at.port or (443 if self._ssl else 80)
        self._lines = "".join(f"{name}: {value}\r\n" for name, value in {"Host": at.netloc, **headers}.items())
        self._idle: list[Wire] = []

    async def post(self, path: str, body: bytes, patience: float) -> Exchange:
        head = f"POST {path} HTTP/1.1\r\n{self._lines}Content-Length: {len(body)}\r\n\r\n".encode("latin-1")
        while True:
            fresh = not self._idle
            wire = await self._connect(patience) if fresh else self._idle.pop()
            if not wire.reusable:
                continue
            exchange = await wire.ask(head + body, patience)
            if exchange.broken == CLOSED and not exchange.status and not fresh:
                continue  # an idle connection that the server had closed; it never saw the request
            if wire.reusable:
                self._idle.append(wire)
            return exchange

    async def open(self, count: int, patience: float) -> None:
        """As many connections as will be used at once, before the first is timed."""
        self._idle = [wire for wire in self._idle if wire.reusable]
        missing = count - len(self._idle)
        self._idle += await asyncio.gather(*(self._connect(patience) for _ in range(missing)))

    async def _connect(self, patience: float) -> Wire:
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(lambda: Wire(self._clock), self._host, self._port, ssl=self._ssl)
        _, wire = await asyncio.wait_for(connecting, timeout=min(patience, 60.0))
        return wire

    def close(self) -> None:
        for wire in self._idle:
            wire.close()
        self._idle.clear()
