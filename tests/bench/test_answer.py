"""What came back, whatever a server sends for text."""

import json
from typing import Any

from stoker.bench.answer import read
from stoker.bench.wire import Exchange


def streamed(*contents: str) -> Exchange:
    """Server-sent events with this text; json.dumps escapes halves of characters as servers do."""
    events: list[Any] = [{"choices": [{"delta": {"content": content}}]} for content in contents]
    events.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    lines = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
    return Exchange(status=200, pieces=[(0.1 * at, line) for at, line in enumerate(lines)])


def test_halves_of_a_character_are_joined_and_a_lone_half_is_replaced() -> None:
    found = read(streamed("a\ud83d", "\ude00b\udc00"))
    assert found.failure is None
    assert found.content == "a\U0001f600b\ufffd"
    assert len(found.digest) == 64


def test_half_a_character_in_a_refusal_is_replaced() -> None:
    body = json.dumps({"error": {"message": "no \ud800 today"}}).encode()
    failure = read(Exchange(status=400, pieces=[(0.0, body)])).failure
    assert failure is not None
    assert failure.message == "no \ufffd today"
