"""The timed client against servers that cut, close, stall, or do not speak HTTP at all."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from stoker.bench.answer import read
from stoker.bench.wire import CLOSED, Exchange, events, open_connections, open_session, timed_post

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED_HEAD = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKED = CHUNKED_HEAD + b"6\r\nhello \r\n5;ext=1\r\nworld\r\n0\r\nTrailer: x\r\n\r\n"
MEASURED = HEAD + b"Content-Length: 11\r\n\r\nhello world"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED


@dataclass
class Raw:
    """A server that sends these bytes to every request, then closes its connection after so many answers."""

    responses: tuple[bytes, ...]
    close_after: int = 99
    pause: float = 0.0
    aborts: bool = False
    connections: int = 0
    heads: list[bytes] = field(default_factory=list)
    written: list[float] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        for _ in range(self.close_after):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            self.heads.append(head)
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length or 0))
            for response in self.responses:
                self.written.append(time.monotonic())
                writer.write(response)
                await writer.drain()
                await asyncio.sleep(self.pause)
        if self.aborts:
            writer.transport.abort()
        writer.close()


def _against(server: Raw, use: Callable[[Any, str], Awaitable[Any]], timeout: float = 5.0) -> Any:
    async def run() -> Any:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        async with open_session(time.monotonic, {}, timeout) as session:
            found = await use(session, url)
        listening.close()
        return found

    return asyncio.run(run())


def _asked(server: Raw, times: int = 1, timeout: float = 5.0) -> list[Exchange]:
    async def use(session: Any, url: str) -> list[Exchange]:
        found = []
        for _ in range(times):
            found.append(await timed_post(session, url, b"{}", time.monotonic, timeout))
            await asyncio.sleep(0.05)  # time to notice that an idle connection was closed
        return found

    return _against(server, use, timeout)


@pytest.mark.parametrize("whole", [CHUNKED, MEASURED, CONTINUED])
def test_a_response_may_be_cut_anywhere(whole):
    for cut in range(1, len(whole), 5):
        [exchange] = _asked(Raw((whole[:cut], whole[cut:]), pause=0.002))
        assert (exchange.status, exchange.body, exchange.failure) == (200, b"hello world", "")


def test_events_have_the_time_of_the_byte_that_completed_them():
    pieces = [(1.0, b": comment\r\ndata: a"), (2.0, b"b\r\n\r\nda"), (3.0, b"ta: c\n"), (4.0, b"\ndata: d\n\ndata: e")]
    assert list(events(pieces)) == [(2.0, "ab"), (4.0, "c"), (4.0, "d"), (4.0, "e")]


def test_several_data_lines_are_one_event():
    assert list(events([(1.0, b"data: a\ndata: b\n\n")])) == [(1.0, "a\nb")]


def test_each_event_is_stamped_when_it_arrives_not_with_its_neighbours():
    chunk = b"9\r\ndata: x\n\n\r\n"
    server = Raw((CHUNKED_HEAD, *[chunk] * 20, b"0\r\n\r\n"), pause=0.01)
    [exchange] = _asked(server)
    arrived = [at for at, _ in events(exchange.pieces)]
    late = sorted(at - written for at, written in zip(arrived, server.written[1:21], strict=True))
    assert len(set(arrived)) == 20
    assert late[0] >= 0
    assert late[10] < 0.005
    assert exchange.sent < server.written[0]


def test_a_connection_is_used_again():
    server = Raw((CHUNKED,))
    exchanges = _asked(server, times=3)
    assert [exchange.body for exchange in exchanges] == [b"hello world"] * 3
    assert [exchange.reused for exchange in exchanges] == [False, True, True]
    assert server.connections == 1


def test_connections_are_open_before_the_first_request_is_timed():
    async def use(session: Any, url: str) -> list[Exchange]:
        await open_connections(session, url, 5)
        return await asyncio.gather(*(timed_post(session, url, b"{}", time.monotonic, 5.0) for _ in range(5)))

    server = Raw((CHUNKED,))
    assert all(exchange.reused for exchange in _against(server, use))
    assert server.connections == 5


def test_an_idle_connection_that_was_closed_is_replaced():
    server = Raw((CHUNKED,), close_after=1)
    assert [exchange.failure for exchange in _asked(server, times=3)] == [""] * 3
    assert server.connections == 3


def test_an_idle_connection_that_closes_as_it_is_asked_is_replaced():
    class Tired(Raw):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            for number in range(2):
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                if number == 0:
                    writer.write(CHUNKED)
            writer.close()

    server = Tired(())
    assert [exchange.body for exchange in _asked(server, times=3)] == [b"hello world"] * 3
    assert server.connections == 3


def test_a_body_may_end_with_the_connection():
    [exchange] = _asked(Raw((HEAD + b"\r\nhello ", b"world"), close_after=1))
    assert (exchange.body, exchange.failure) == (b"hello world", "")


@pytest.mark.parametrize("aborts", [False, True])
def test_a_body_cut_short_is_said_and_what_came_is_kept(aborts):
    [exchange] = _asked(Raw((CHUNKED[:-20],), close_after=1, aborts=aborts, pause=0.05))
    assert (exchange.failure, exchange.reason) == ("closed early", CLOSED)
    assert exchange.body.startswith(b"hello ")


def test_bytes_that_look_like_the_end_are_not_the_end():
    tricky = b"data: 0\r\n\r\n"
    body = b"".join(b"%x\r\n%s\r\n" % (len(tricky), tricky) for _ in range(3))
    first = CHUNKED_HEAD + body[: len(tricky) + 3]
    [exchange] = _asked(Raw((first, body[len(tricky) + 3 :], b"0\r\n\r\n"), pause=0.02))
    assert [data for _, data in events(exchange.pieces)] == ["0"] * 3
    assert len({at for at, _ in exchange.pieces}) >= 2


def test_nothing_asks_for_compression_which_would_batch_events():
    server = Raw((CHUNKED,))
    _asked(server)
    assert b"accept-encoding: identity\r\n" in server.heads[0].lower()


@pytest.mark.parametrize(
    ("responses", "kind", "words"),
    [
        ((b"SSH-2.0-OpenSSH_9.2\r\n\r\n",), "malformed", "what arrived is no HTTP: "),
        ((b"HTTP/1.1 200 OK\r\n" + b"x" * 100_000,), "malformed", "what arrived is no HTTP: "),
        ((CHUNKED_HEAD + b"zz\r\nhello\r\n",), "malformed", "what arrived is no HTTP: "),
        ((), "closed early", CLOSED),
        ((b"HTTP/1.1 2",), "closed early", CLOSED),
    ],
    ids=["SSH", "endless header", "no chunk size", "nothing", "half a line"],
)
def test_what_is_no_answer_is_reported(responses, kind, words):
    [exchange] = _asked(Raw(responses, close_after=1, pause=0.05))
    failure = read(exchange).failure
    assert failure is not None
    assert failure.kind == kind
    assert failure.message.startswith(words)


@pytest.mark.parametrize("responses", [(), (CHUNKED_HEAD,), (CHUNKED_HEAD + b"6\r\nhello \r\n",)])
def test_a_server_that_stops_sending_is_a_timeout(responses):
    [exchange] = _asked(Raw(responses, pause=1.0), timeout=0.3)
    assert (exchange.failure, exchange.reason) == ("timeout", "nothing arrived for 0.3 s")
    assert 0.25 < exchange.ended - exchange.sent < 0.9


def test_a_slow_answer_is_none_as_long_as_something_comes():
    [exchange] = _asked(Raw((CHUNKED_HEAD, *[b"1\r\nx\r\n"] * 6, b"0\r\n\r\n"), pause=0.1), timeout=0.3)
    assert (exchange.failure, exchange.body) == ("", b"xxxxxx")


def test_a_server_that_is_gone_is_no_connection():
    async def run() -> Exchange:
        async with open_session(time.monotonic, {}, 5.0) as session:
            return await timed_post(session, "http://127.0.0.1:9/v1", b"{}", time.monotonic, 5.0)

    exchange = asyncio.run(run())
    assert exchange.failure == "connection"
    assert exchange.reason.startswith("no connection to http://127.0.0.1:9/v1: ")
    assert exchange.sent == exchange.ended > 0
