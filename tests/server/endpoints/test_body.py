"""Whatever one client sends, another is answered: /health is asked every 10 ms while hostile requests run."""

import json
import time
from typing import Any

import httpx2 as httpx
import pytest

from stoker.server.endpoints import body as bodies
from stoker.server.schemas.completions import CompletionRequest
from tests.server.running import HEALTH_S, Running, chat_body

HOSTILE: dict[str, tuple[str, Any, int]] = {
    "a prompt of millions of ids": ("/v1/completions", {"prompt": [1] * 5_000_000}, 400),
    "millions of ids to decode": ("/detokenize", {"tokens": [1] * 3_000_000}, 400),
    "as many ids as are taken": ("/detokenize", {"tokens": [100] * 290_000}, 200),
    "megabytes to tokenize": ("/tokenize", {"prompt": "word, " * 500_000}, 200),
    "half a million messages": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}] * 400_000},
        400,
    ),
    "a million mistakes": ("/v1/chat/completions", {"messages": [1] * 1_000_000}, 400),
    "a quarter of a million mistakes": ("/v1/messages", {"messages": [1] * 250_000, "max_tokens": 1}, 400),
    "an objects' forest": ("/v1/responses", {"input": "x", "metadata": [{}] * 3_000_000}, 400),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_health_answers_while_a_large_request_is_read(server: Running, kind: str) -> None:
    path, body, status = HOSTILE[kind]
    content = json.dumps(body, separators=(",", ":")).encode()
    with server.health_asked() as seconds:
        time.sleep(0.1)
        response = httpx.post(
            server.url + path, content=content, headers={"content-type": "application/json"}, timeout=120.0
        )
    assert response.status_code == status, response.text[:500]
    print(f"{kind}: {max(seconds) * 1e3:.0f} ms")
    assert len(seconds) > 5
    assert max(seconds) < HEALTH_S


def test_a_refusal_of_a_large_body_has_the_numbers(server: Running) -> None:
    response = server.post("/v1/completions", {"prompt": [1] * 400_000})
    assert response.status_code == 400
    assert "400,002 values" in response.json()["error"]["message"]
    assert "300,000" in response.json()["error"]["message"]
    response = server.post("/v1/chat/completions", {"messages": [1] * 20_000})
    assert response.status_code == 400
    assert "and 19995 more" in response.json()["error"]["message"]


def test_texts_full_of_commas_are_no_many_values(server: Running) -> None:
    response = server.post("/tokenize", {"prompt": "a,b,[c],{d}," * 100_000})
    assert response.status_code == 200, response.text[:500]


def test_the_bound_is_never_below_the_count() -> None:
    for value in ({}, [], 5, "a,b", [1, [2, {"a": []}], {}], chat_body(), {"a": {"b": {"c": [1, 2, 3]}}}):
        assert bodies.count(value)[0] <= bodies.max_values(json.dumps(value).encode()) + 1


def test_what_the_child_says_is_what_the_server_says() -> None:
    place = (CompletionRequest.__module__, CompletionRequest.__qualname__)
    assert bodies.find_problem(b'{"prompt": "x"}', *place) is None
    assert "prompt: Field required" in str(bodies.find_problem(b"{}", *place))
    assert "is no JSON" in str(bodies.find_problem(b"{", *place))
    assert "UTF-8" in str(bodies.find_problem(b'"\xc3"', *place))
    assert "nested" in str(bodies.find_problem(b"[" * 200_000, *place))


def test_pieces_of_an_answer_are_its_json() -> None:
    for value in ({"a": list(range(7001)), "b": {"c": ["é"] * 2001, "d": None}, "e": []}, {}, {"x": [[1] * 3000]}):
        assert json.loads("".join(bodies._json_parts(value))) == value
