"""Whatever happens to clients, engine or server: every accepted request ends in a result or an error, nothing leaks."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest

from tests.server.faulty import HANG, RAISE, SLOW
from tests.server.running import PATIENCE_S, Running, chat_body

BODY_TIMEOUT_S = 8.0  # a client of eighty threads on a busy machine may take seconds to say its first word


@pytest.fixture(scope="module")
def faulty() -> Iterator[Running]:
    given = ["--model", "demo", "--users", "4", "--body-timeout", str(BODY_TIMEOUT_S), "--step-timeout", "20"]
    server = Running(*given, "--drain-timeout", "8", module="tests.server.faulty")
    try:
        _said_while_loading(server)
        _said_when_ready(server.wait())
        yield server
    finally:
        server.stop()


def _said_while_loading(server: Running) -> None:
    """Loading takes seconds, so the first requests are too early: they are told how far it is and when to come back."""
    loading, refused = server.get("/ready"), server.post("/v1/chat/completions", chat_body())
    assert (loading.status_code, refused.status_code, server.get("/health").status_code) == (503, 503, 200)
    assert set(loading.json()) == {"ready", "phase", "detail", "percent", "eta_s"}
    assert loading.json()["phase"] in ("starting", "loading")
    assert int(loading.headers["retry-after"]) > 0
    assert int(refused.headers["retry-after"]) > 0
    assert "not loaded yet" in refused.json()["error"]["message"]


def _said_when_ready(server: Running) -> None:
    """How long each phase took; together they are the whole start."""
    found = server.get("/ready").json()
    names = [phase["name"] for phase in found["phases"]]
    assert names[:3] == ["planning", "starting the engine", "starting"]
    assert names[-1] == "self-test"
    assert "reading weights" in names
    assert found["ready_s"] == pytest.approx(sum(phase["seconds"] for phase in found["phases"]), abs=0.01)
    assert any("ready after" in line and "self-test" in line for line in server.log.splitlines())


@pytest.fixture
def server(faulty: Running) -> Iterator[Running]:
    """Whatever a test did to it, it serves again."""
    yield faulty
    faulty.wait()
    assert faulty.chat(max_tokens=3)["usage"]["completion_tokens"] <= 3
    faulty.until_idle()  # last, or the next test would take this request for its own


def lines(server: Running, body: dict[str, Any], taken: Callable[[], object] = lambda: None) -> Iterator[str]:
    """`taken` is called when the server has accepted the request."""
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S) as response:
        if response.status_code != 200:
            response.read()
            yield f"status {response.status_code} {response.text}"
            return
        taken()
        yield from (line for line in response.iter_lines() if line)


def slow(tokens: int = 400, **more: Any) -> dict[str, Any]:
    """An answer that takes long enough for something to happen to it."""
    more.setdefault("seed", SLOW)
    return chat_body(max_tokens=tokens, ignore_eos=True, temperature=1.0, stream=True, **more)


def outcome(server: Running, body: dict[str, Any], taken: Callable[[], object] = lambda: None) -> str:
    """How a stream ended: done, error or silence."""
    try:
        found = list(lines(server, body, taken))
    except httpx.HTTPError as error:
        return f"broken off: {error!r}"
    if found and found[0].startswith("status"):
        return found[0]
    told = [line for line in found if '"error"' in line]
    if told:
        print(told)
        return "error" if found[-1] == "data: [DONE]" else "no end"
    finished = any('"finish_reason":"length"' in line for line in found)
    return "done" if finished and found[-1] == "data: [DONE]" else "silence"


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def test_two_hundred_clients_that_leave_in_the_middle(server: Running) -> None:
    before = server.gauges().get("vllm:generation_tokens_total", 0.0)

    def leave(number: int) -> None:
        url = f"{server.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=slow(200, seed=number), timeout=PATIENCE_S) as response:
            assert response.status_code == 200
            if number % 3:  # the others leave before the first token
                next(response.iter_lines())

    for _ in range(4):
        together(50, leave)
    server.until_idle()
    made = server.gauges()["vllm:generation_tokens_total"] - before
    assert made < 200 * 200 / 2, "they were computed to the end for nobody"


def test_a_client_that_leaves_before_its_whole_answer(server: Running) -> None:
    body = {**slow(4000), "stream": False}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=0.7)
    server.until_idle()


def test_a_client_that_is_killed(server: Running) -> None:
    script = f"""
        import httpx2 as httpx
        with httpx.stream("POST", "{server.url}/v1/chat/completions", json={slow()!r}, timeout=60) as response:
            for line in response.iter_lines():
                print(line, flush=True)
    """
    client = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert client.stdout
    assert client.stdout.readline().startswith("data")
    client.kill()
    client.wait()
    client.stdout.close()
    server.until_idle()


def test_fifty_clients_that_connect_and_stall(server: Running) -> None:
    """Some say nothing, some half a head, some half a body; others are served meanwhile, and they are let go."""
    host, port = server.url.removeprefix("http://").split(":")
    half = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    said = [b"", half, half + b"content-length: 100\r\n\r\n{"]
    stalled = [socket.create_connection((host, int(port)), timeout=PATIENCE_S) for _ in range(50)]
    for place, client in enumerate(stalled):
        client.sendall(said[place % 3])
    assert server.chat(max_tokens=3)["choices"]
    answers = []
    for client in stalled:
        with client.makefile("rb") as reading:
            answers.append(reading.read())  # up to the end of the connection
        client.close()
    assert set(answers[0::3]) | set(answers[1::3]) == {b""}
    assert all(answer.startswith(b"HTTP/1.1 408") and b"8 s" in answer for answer in answers[2::3])


def test_streams_that_nobody_reads_give_up_their_slots_to_who_waits(server: Running) -> None:
    """All four are taken, and after 5 s the fifth is served; alone they would have had 30 s."""
    host, port = server.url.removeprefix("http://").split(":")
    body = chat_body(max_tokens=4000, ignore_eos=True, stream=True, logprobs=True, top_logprobs=20)
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
    deaf = []
    for _ in range(4):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(head.encode() + content)
        deaf.append(client)
    server.until(lambda: server.get("/state").json()["engine"]["running"] == 4, "four running requests")
    assert server.chat(max_tokens=3)["choices"]
    assert "a client did not read its answer for 5 s" in server.log
    for client in deaf:
        client.close()


def test_the_engine_process_is_killed(server: Running) -> None:
    pid = server.get("/state").json()["engine"]["pid"]
    restarts = server.gauges()["stoker:engine_restarts_total"]
    ended: list[str] = []
    clients = [threading.Thread(target=lambda: ended.append(outcome(server, slow(4000)))) for _ in range(6)]
    for client in clients:
        client.start()
    server.until(lambda: server.get("/state").json()["engine"]["running"] == 4, "four running requests")
    os.kill(pid, signal.SIGKILL)
    server.until(lambda: server.get("/health").status_code == 503, "a red /health")
    refused = server.post("/v1/chat/completions", chat_body())
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    assert "SIGKILL" in refused.json()["error"]["message"] or "started again" in refused.json()["error"]["message"]
    for client in clients:
        client.join(PATIENCE_S)
    assert ended == ["error"] * 6
    server.wait()
    assert server.get("/health").json() == {"status": "ready"}
    assert server.gauges()["stoker:engine_restarts_total"] == restarts + 1


def test_a_step_hangs(server: Running) -> None:
    """The one that did it and the one beside it are told, and the next ones are served by a new engine."""
    beside: list[str] = []
    client = threading.Thread(target=lambda: beside.append(outcome(server, slow(4000))))
    client.start()
    server.until(lambda: server.get("/state").json()["engine"]["running"] == 1, "a running request")
    response = server.post("/v1/chat/completions", chat_body(seed=HANG))
    assert response.status_code == 503
    message = response.json()["error"]["message"]
    assert "was killed by this program: it gave no sign of life for" in message, message
    assert "memory" not in message  # nobody is sent looking for the kernel's out-of-memory killer
    client.join(PATIENCE_S)
    assert beside == ["error"]


def test_a_step_raises_and_every_api_tells_so_in_its_own_words(server: Running) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "seed": SLOW},
        "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4000},
        "/v1/responses": {"input": "x", "max_output_tokens": 4000},
    }

    def read(path: str) -> list[str]:
        with httpx.stream("POST", server.url + path, json={**bodies[path], "stream": True}, timeout=60.0) as response:
            return [line for line in response.iter_lines() if line]

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(read, "/v1/completions")
        server.until(lambda: server.get("/state").json()["engine"]["running"] == 1, "a running request")
        # steps are slow now; these two have hardly begun when the engine fails
        others = [pool.submit(read, path) for path in ("/v1/messages", "/v1/responses")]
        refused = server.post("/v1/chat/completions", chat_body(seed=RAISE))
        completion, message, response = (future.result(PATIENCE_S) for future in (first, *others))
    assert refused.status_code == 503
    assert "a planted fault" in refused.json()["error"]["message"]
    assert completion[-1] == "data: [DONE]"
    assert "a planted fault" in json.loads(completion[-2].removeprefix("data: "))["error"]["message"]
    kinds = ("error", "message_stop"), ("response.failed", "response.completed", "response.incomplete")
    for found, ends in zip((message, response), kinds, strict=True):
        last = json.loads(found[-1].removeprefix("data: "))
        # an answer may have ended before the fault, or come after it and found no engine
        assert last.get("type") in ends or last["error"]["code"] in ("not_ready", "engine_unavailable"), found[-1]


def test_the_queue_is_bounded(server: Running) -> None:
    """4 run, 64 wait, the rest is told to come again; those taken are answered."""
    found = together(80, lambda number: outcome(server, chat_body(max_tokens=2, ignore_eos=True, stream=True)))
    refused = [each for each in found if each != "done"]
    assert all(each.startswith("status 429") and "no room for 1 more" in each for each in refused), refused


def test_sigterm_under_load_drains_and_ends(faulty: Running) -> None:
    """Short answers come to their end, long ones are told why not, and the exit code is 0. It is the last test here."""
    engine = faulty.get("/state").json()["engine"]["pid"]
    bodies = [slow(4000), slow(4000), slow(10), slow(10), slow(10)]
    all_taken = threading.Barrier(len(bodies) + 1)
    with ThreadPoolExecutor(len(bodies)) as pool:
        ends = [pool.submit(outcome, faulty, body, lambda: all_taken.wait(PATIENCE_S)) for body in bodies]
        all_taken.wait(PATIENCE_S)
        faulty.process.send_signal(signal.SIGTERM)
        assert [end.result(PATIENCE_S) for end in ends] == ["error", "error", "done", "done", "done"]
    assert faulty.process.wait(PATIENCE_S) == 0, faulty.log
    last_words = faulty.log.partition("SIGTERM: no more requests are taken")[2]
    assert "running ones have 8 s to end" in last_words
    assert "Traceback" not in last_words
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)
