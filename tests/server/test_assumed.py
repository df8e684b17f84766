"""A server that accepts drafts unseen says so wherever it says anything about speed."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.running import NO_THINK, Running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    running = Running("--model", "demo", "--draft", "mtp:2", "--assume-acceptance", "2.2", "--users", "2")
    try:
        yield running.wait()
    finally:
        running.stop()


def test_every_response_names_it(server: Running) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]}
    grammar = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    more: dict[str, Any]
    for more in ({"ignore_eos": True}, {"response_format": grammar}):
        answer = server.chat(max_tokens=64, chat_template_kwargs=NO_THINK, **more)
        assert answer["metrics"]["speculative_decoding"]["acceptance_assumed"] == 2.2
    assert json.loads(answer["choices"][0]["message"]["content"]), "what a grammar allows is looked at"
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 221, "ignore_eos": True}
    metrics = server.post("/v1/completions", body).json()["metrics"]
    assert metrics["accepted_per_step"] == pytest.approx(2.2, rel=0.01)
    assert metrics["speculative_decoding"]["acceptance_assumed"] == 2.2


def test_metrics_readiness_and_the_log_name_it(server: Running) -> None:
    assert server.gauges()["stoker:acceptance_assumed"] == 2.2
    assert server.get("/ready").json()["acceptance_assumed"] == 2.2
    assert "acceptance assumed" in server.log
    assert "2.2 tokens a step" in server.log
