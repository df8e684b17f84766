"""Clients that stop reading or writing are disconnected, and an answer may pause for as long as it likes."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import uvicorn

from stoker.demo import EMBEDDED
from stoker.server.config import ServerConfig
from stoker.server.guard import Guard
from stoker.server.protocol import TimeoutProtocol
from stoker.server.stream import EventStream

STALL_S = 1.0
EVENT = "x" * 1000
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\n"


class Served:
    """One uvicorn server in this process, and what became of its streams."""

    def __init__(self, requests_queued: bool = False, pause: float = 0.0, events: int = 100_000) -> None:
        self.made, self.closed_after = 0, -1.0
        self.connections: set[Any] = set()
        self._began = 0.0
        self._pause, self._events = pause, events
        limits: dict[str, Any] = {"body_timeout": STALL_S, "stall_timeout": 60.0 if requests_queued else STALL_S}
        limits |= {"busy_stall_timeout": STALL_S, "requests_queued": staticmethod(lambda: requests_queued)}
        self.protocol = type("Protocol", (TimeoutProtocol,), limits)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/whole":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x" * (32 << 20)})
            return
        while (await receive()).get("more_body"):
            pass
        self._began = time.monotonic()
        await EventStream(self._made(), lambda error: "error", "end", self._close)(scope, receive, send)

    async def _made(self) -> AsyncIterator[str]:
        for _ in range(self._events):
            await asyncio.sleep(self._pause)
            self.made += 1
            yield EVENT

    def _close(self) -> None:
        self.closed_after = time.monotonic() - self._began

    def run(self, client: Callable[[socket.socket], Awaitable[None]]) -> None:
        async def run() -> None:
            config = ServerConfig(EMBEDDED, ("x",), body_timeout=STALL_S)
            guard = Guard(self.app, config)
            server = uvicorn.Server(
                uvicorn.Config(guard, http=self.protocol, port=0, lifespan="off", log_config=None, ws="none")
            )
            listening = socket.create_server(("127.0.0.1", 0))
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            while not server.started:
                await asyncio.sleep(0.01)
            with socket.create_connection(listening.getsockname()) as sock:
                sock.setblocking(False)
                self.connections = server.server_state.connections
                await asyncio.wait_for(client(sock), 60.0)
            server.should_exit = True
            await serving

        asyncio.run(run())


async def ended(sock: socket.socket) -> bytes:
    """Everything up to the end of a connection."""
    found = bytearray()
    with suppress(ConnectionResetError):
        while data := await asyncio.get_running_loop().sock_recv(sock, 65536):
            found += data
    return bytes(found)


@pytest.mark.parametrize("requests_queued", [False, True])
def test_a_stream_that_nobody_reads_is_given_up(requests_queued: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Soon, where others wait for its place; and not much of it is made."""
    served = Served(requests_queued)

    async def client(sock: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, POST + b"content-length: 0\r\n\r\n")
        while served.closed_after < 0:
            await asyncio.sleep(0.05)

    served.run(client)
    assert served.closed_after < 20.0
    assert served.made < 8000  # of 100,000; what fits the buffers of a kernel
    assert "did not read its answer" in caplog.text


def test_a_whole_answer_that_nobody_reads_does_not_stay_open() -> None:
    served = Served()

    async def client(sock: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, b"GET /whole HTTP/1.1\r\nhost: localhost\r\n\r\n")
        while not served.connections:
            await asyncio.sleep(0.05)
        while served.connections:
            await asyncio.sleep(0.05)

    served.run(client)


def test_an_answer_may_pause_for_longer_than_a_client() -> None:
    served = Served(pause=1.5 * STALL_S, events=2)

    async def client(sock: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, POST + b"connection: close\r\ncontent-length: 0\r\n\r\n")
        assert (await ended(sock)).count(EVENT.encode()) == 2

    served.run(client)


def test_a_body_that_comes_byte_by_byte_has_one_limit_in_all() -> None:
    served = Served()

    async def client(sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, POST + b"content-length: 1000\r\n\r\n")
        reading = asyncio.create_task(ended(sock))
        for _ in range(100):
            if reading.done():
                break
            await asyncio.sleep(STALL_S / 4)
            try:
                await loop.sock_sendall(sock, b"x")
            except OSError:
                break
        else:
            raise AssertionError("the connection stayed open")
        assert b"408" in (await reading)[:20]

    served.run(client)


def test_a_body_in_scraps_is_refused() -> None:
    served = Served()

    async def client(sock: socket.socket) -> None:
        sending = POST + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20_000
        cpu = time.process_time()
        with suppress(OSError):  # closed before all was sent
            await asyncio.get_running_loop().sock_sendall(sock, sending)
        await ended(sock)
        assert served.made == 0
        assert time.process_time() - cpu < 0.5

    served.run(client)


def test_a_body_in_chunks_is_read() -> None:
    served = Served(events=1)

    async def client(sock: socket.socket) -> None:
        chunks = b"20\r\n" + b"x" * 32 + b"\r\n"
        sending = POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + chunks * 3000 + b"0\r\n\r\n"
        await asyncio.get_running_loop().sock_sendall(sock, sending)
        assert b" 200 " in (await ended(sock))[:20]

    served.run(client)
