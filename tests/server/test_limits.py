"""What a request may ask for has bounds, and within them its neighbours do not notice."""

import threading
import time
from typing import Any

import pytest

from tests.server.running import PATIENCE_S, Running, chat_body

MOST = 4096


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {str(token): 1.0 for token in range(MOST + 1)}),
        ("stop_token_ids", [5] * 200_000),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_more_token_ids_than_a_step_should_look_at_are_refused(
    server: Running, path: str, field: str, value: Any
) -> None:
    body = chat_body() if "chat" in path else {"prompt": "Hello", "max_tokens": 1}
    response = server.post(path, {**body, field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert error["message"] == f"{field} has {len(value):,} entries, and at most 4,096 are taken."


def test_a_million_stop_ids_are_refused_before_they_are_read(server: Running) -> None:
    response = server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 1, "stop_token_ids": [5] * 1_000_000})
    assert response.status_code == 400
    assert "at most 300,000 values" in response.json()["error"]["message"]


def test_a_stream_beside_requests_with_as_many_ids_as_allowed_does_not_slow(server: Running) -> None:
    def seconds() -> float:
        started = time.monotonic()
        server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True}).raise_for_status()
        return time.monotonic() - started

    def ask(**extra: Any) -> int:
        body = {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True, **extra}
        return server.post("/v1/completions", body).status_code

    def beside(**extra: Any) -> float:
        found: list[int] = []
        others = [threading.Thread(target=lambda: found.append(ask(**extra))) for _ in range(3)]
        for other in others:
            other.start()
        took = seconds()
        for other in others:
            other.join(PATIENCE_S)
        assert found == [200] * 3
        return took

    plain = beside()
    ids = list(range(100, 100 + MOST))
    many = beside(logit_bias={str(token): -1.0 for token in ids}, stop_token_ids=ids, min_tokens=60)
    assert many < 2 * plain + 1.0, (plain, many)
