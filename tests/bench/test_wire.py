"""HTTP as servers really send it: any framing, cut anywhere, connections that are closed when idle."""

import asyncio
import time
from urllib.parse import urlsplit

import pytest

from stoker.bench.sse import events
from stoker.bench.wire import CLOSED, Exchange, Framing, Wires

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n6\r\nhello \r\n5;ext=1\r\nworld\r\n0\r\nTrailer: x\r\n\r\n"
MEASURED = HEAD + b"Content-Length: 11\r\n\r\nhello world"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED


@pytest.mark.parametrize("whole", [CHUNKED, MEASURED, CONTINUED])
def test_a_response_may_be_cut_anywhere(whole):
    for cut in range(1, len(whole)):
        framing = Framing()
        payload = framing.feed(whole[:cut])
        assert not framing.done
        payload += framing.feed(whole[cut:])
        assert (framing.status, payload, framing.done) == (200, b"hello world", True)
    framing = Framing()
    assert b"".join(framing.feed(bytes([byte])) for byte in whole) == b"hello world"
    assert framing.keeps_open


def test_what_is_no_http_is_refused():
    with pytest.raises(ValueError, match="not an HTTP/1 response"):
        Framing().feed(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")


def test_events_have_the_time_of_the_byte_that_completed_them():
    pieces = [(1.0, b": comment\r\ndata: a"), (2.0, b"b\r\n\r\nda"), (3.0, b"ta: c\n"), (4.0, b"\ndata: d\n\ndata: e")]
    assert list(events(pieces)) == [(2.0, "ab"), (4.0, "c"), (4.0, "d"), (4.0, "e")]


def test_several_data_lines_are_one_event():
    assert list(events([(1.0, b"data: a\ndata: b\n\n")])) == [(1.0, "a\nb")]


def _asked(*responses: bytes, close_after: int = 99, times: int = 1, pause: float = 0.0) -> list[Exchange]:
    """Exchanges with a server that sends these bytes, then closes its connection after so many answers."""
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        answered = 0
        while answered < close_after:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            for response in responses:
                writer.write(response)
                await writer.drain()
                await asyncio.sleep(pause)
            answered += 1
        writer.close()

    async def run() -> list[Exchange]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        wires = Wires(urlsplit(f"http://127.0.0.1:{port}"), time.monotonic, {})
        found = []
        for _ in range(times):
            found.append(await wires.post("/", b"{}", patience=5.0))
            await asyncio.sleep(0.05)  # time to notice that an idle connection was closed
        found[0].framing.headers["connections"] = str(len(connections))
        wires.close()
        server.close()
        return found

    return asyncio.run(run())


def test_a_connection_is_used_again():
    exchanges = _asked(CHUNKED, times=3)
    assert [exchange.body for exchange in exchanges] == [b"hello world"] * 3
    assert exchanges[0].framing.headers["connections"] == "1"


def test_an_idle_connection_that_was_closed_is_replaced():
    exchanges = _asked(CHUNKED, times=3, close_after=1)
    assert [exchange.broken for exchange in exchanges] == [""] * 3
    assert exchanges[0].framing.headers["connections"] == "3"


def test_a_body_may_end_with_the_connection():
    [exchange] = _asked(HEAD + b"\r\nhello ", b"world", close_after=1)
    assert (exchange.body, exchange.broken) == (b"hello world", "")


def test_a_body_cut_short_is_said():
    [exchange] = _asked(CHUNKED[:-20], close_after=1)
    assert exchange.broken == CLOSED


def test_bytes_that_look_like_the_end_are_not_the_end():
    tricky = b"data: 0\r\n\r\n"
    body = b"".join(b"%x\r\n%s\r\n" % (len(tricky), tricky) for _ in range(3))
    first = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body[: len(tricky) + 3]
    [exchange] = _asked(first, body[len(tricky) + 3 :], b"0\r\n\r\n", pause=0.02)
    assert [data for _, data in events(exchange.pieces)] == ["0"] * 3
    assert len({at for at, _ in exchange.pieces}) >= 2
