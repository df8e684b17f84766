"""Grammars that hang, crash or fatten the grammar library cost the request that sent them, and nobody else."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.server.running import Running, chat_body, text_of
from tests.support.extent import ALL

GAP_S = 1.0  # the longest a neighbour's stream may stand still
LARGE = {  # an honest schema of 234,000 characters
    "type": "object",
    "properties": {f"property_{i}": {"enum": [f"{i}", "y" * 600]} for i in range(360)},
    "required": [f"property_{i}" for i in range(360)],
    "additionalProperties": False,
}


def chain(length: int, keyword: str) -> dict[str, Any]:
    def link(i: int) -> dict[str, Any]:
        target = {"$ref": f"#/$defs/d{i}"}
        return target if keyword == "$ref" else {keyword: [target]}

    definitions: dict[str, Any] = {f"d{i}": link(i + 1) for i in range(length)}
    return {**link(0), "$defs": {**definitions, f"d{length}": {"type": "integer"}}}


def intersected(count: int) -> dict[str, Any]:
    return {"type": "string", "allOf": [{"pattern": f"a.{{{i + 1}}}b"} for i in range(count)]}


def asking(schema: Any, **more: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return chat_body("Answer.", response_format=wanted, **more)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    # each check that takes too long keeps a core busy for as long as it may take
    shorter: dict[str, Any] = {"module": "tests.server.faulty", "env": {"STOKER_TEST_CHECK_S": "2"}}
    server = Running("--model", "demo", "--users", "4", **({} if ALL else shorter))
    try:
        yield server.wait()
    finally:
        assert server.stop() == 0


def neighbour(server: Running, meanwhile: Callable[[], object]) -> tuple[str, float]:
    """The text of a stream that runs while something is done, and its longest gap."""
    began, gaps, chunks = threading.Event(), [0.0], []

    def read() -> None:
        last = time.monotonic()
        for chunk in server.stream("/v1/chat/completions", chat_body("Tell me a story.", max_tokens=1500, seed=1)):
            chunks.append(chunk)
            if began.is_set():
                gaps.append(time.monotonic() - last)
            last = time.monotonic()
            began.set()

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        assert began.wait(60)
        meanwhile()
        reading.result()
    assert "error" not in chunks[-1], (chunks[-1], server.log[-3000:])
    return text_of(chunks), max(gaps)


@pytest.mark.parametrize("keyword", ["$ref", "allOf", "anyOf"])
def test_a_chain_that_overflows_the_compilers_stack_is_refused(running: Running, keyword: str) -> None:
    for length in (2500, 5000):
        response = running.post("/v1/chat/completions", asking(chain(length, keyword)))
        assert response.status_code in (200, 400), response.text
    if keyword == "$ref":
        assert response.status_code == 400
    running.chat()


def test_intersected_patterns_do_not_hold_up_a_neighbour(running: Running) -> None:
    body = asking(intersected(30))
    answers: list[httpx.Response] = []
    alone, _ = neighbour(running, lambda: None)
    text, gap = neighbour(running, lambda: answers.append(running.post("/v1/chat/completions", body)))
    assert answers[0].status_code == 400
    assert "too complex" in answers[0].text or "memory" in answers[0].text
    assert text == alone
    assert gap < GAP_S


def test_after_clients_with_hostile_grammars_left_others_are_served_and_memory_is_back(running: Running) -> None:
    running.chat()
    before = running.memory
    for number in range(6):
        with suppress(httpx.TimeoutException):
            httpx.post(f"{running.url}/v1/chat/completions", json=asking(intersected(40 + number)), timeout=0.2)
    began = time.monotonic()
    running.chat()
    assert time.monotonic() - began < 5
    running.until(lambda: running.memory < before + 50, "less memory", patience=30)


def test_a_crowd_of_schemas_that_take_long_to_check_does_not_keep_others_from_being_read(running: Running) -> None:
    def send(number: int) -> int:
        try:
            body = asking(intersected(60 + number))
            return httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60).status_code
        except httpx.HTTPError:
            return 0

    with ThreadPoolExecutor(24) as crowd:
        sent = [crowd.submit(send, number) for number in range(24)]
        time.sleep(0.3)
        began = time.monotonic()
        running.chat()
        assert time.monotonic() - began < 5
        assert {each.result() for each in sent} <= {400, 503}


def test_many_answers_to_one_large_schema_do_not_hold_up_a_neighbour(running: Running) -> None:
    count = 64 if ALL else 8
    body = asking(LARGE, n=count, max_tokens=8, temperature=1.0)
    found: list[httpx.Response] = []
    _, gap = neighbour(running, lambda: found.append(running.post("/v1/chat/completions", body)))
    assert found[0].status_code == 200, found[0].text
    assert len(found[0].json()["choices"]) == count
    assert gap < GAP_S


def test_a_worker_that_is_killed_costs_at_most_its_request(running: Running) -> None:
    chunks: list[dict[str, Any]] = []
    killed = 0
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 300}
    with suppress(AssertionError):
        for chunk in running.stream("/v1/chat/completions", asking(schema, max_tokens=300)):
            chunks.append(chunk)
            if len(chunks) == 5:
                for pid in running.processes:
                    with suppress(OSError):
                        if b"stoker.engine.grammar.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                            os.kill(pid, signal.SIGKILL)
                            killed += 1
    assert killed
    assert "error" in chunks[-1] or text_of(chunks).startswith("[")
    assert running.chat(response_format={"type": "json_object"})["choices"]
    assert running.gauges()["stoker:healthy"] == 1
