"""Streams to clients that stop reading, and to clients whose answer pauses."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stoker.server.streaming import EventStream

STALL_S = 0.05


async def sent(pause: float, blocked_at: int | None) -> tuple[list[bytes], list[str]]:
    """What a client got of three events before the stream ended, and what was closed; it takes no more than
    `blocked_at` of them."""
    taken: list[bytes] = []
    closed: list[str] = []

    async def events() -> AsyncIterator[str]:
        try:
            for number in range(3):
                await asyncio.sleep(pause)
                yield f"{number}"
        finally:
            closed.append("events")

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            if len(taken) == blocked_at:
                await asyncio.Event().wait()
            taken.append(message["body"])

    async def receive() -> Any:
        await asyncio.Event().wait()

    stream = EventStream(events(), lambda error: "error", STALL_S, "end", lambda: closed.append("request"))
    await asyncio.wait_for(stream({}, receive, send), 60.0)
    return taken, closed


@pytest.mark.parametrize("blocked_at", [0, 1, 3])
def test_a_client_that_stops_reading_is_let_go(blocked_at: int, caplog: pytest.LogCaptureFixture) -> None:
    taken, closed = asyncio.run(sent(0.0, blocked_at))
    assert taken == [b"0", b"1", b"2"][:blocked_at]
    assert closed == ["events", "request"]
    assert "took nothing of its stream" in caplog.text


def test_an_answer_may_pause_for_longer_than_a_client() -> None:
    assert asyncio.run(sent(3 * STALL_S, None)) == ([b"0", b"1", b"2", b"end"], ["events", "request"])
