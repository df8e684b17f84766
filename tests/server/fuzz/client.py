"""Sends cases over plain sockets and judges the answers. `python -m tests.server.fuzz.client URL FIRST END STEP`
writes a line of JSON per case."""

import contextlib
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from tests.server.fuzz.cases import Case, case
from tests.server.fuzz.requests import GETS, POSTS

TIMEOUT_S = 180.0  # an answer as long as the context takes over a minute beside others
BUSY = ("busy", "queue_full")  # codes of a 503 or 429 that asks a client to come back; any other is a fault
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a connection that is closed is reset
LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Result:
    number: int
    endpoint: str
    outcome: str  # a status, "left" or "closed"
    seconds: float
    problem: str | None = None


def attempt(url: str, sent: Case) -> Result:
    began, outcome, problem = time.monotonic(), "closed", None
    try:
        answer = exchange(url, sent)
        outcome = "left" if answer is None else str(answer.status)
        problem = None if answer is None else complaint(sent, answer)
    except TimeoutError:
        problem = f"no answer within {TIMEOUT_S:g} s"
    except (OSError, HTTPException) as error:
        problem = None if sent.malformed else f"no answer: {error!r}"
    path = sent.path.partition("?")[0]
    endpoint = path if path in POSTS or path in GETS else "other"
    return Result(sent.number, endpoint, outcome, round(time.monotonic() - began, 3), problem)


def exchange(url: str, sent: Case) -> Answer | None:
    """None where the client left before the end."""
    found = urlsplit(url)
    with socket.create_connection((found.hostname, found.port), timeout=TIMEOUT_S) as connection:
        connection.sendall(_head(sent, found.netloc))
        with contextlib.suppress(ConnectionError):  # refused before all of it was sent: the answer says why
            for part in _parts(sent):
                connection.sendall(part)
        if sent.cut is not None:
            return None
        if sent.read is not None:
            if sent.read:
                connection.recv(sent.read)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            return None
        response = HTTPResponse(connection, method=sent.method)
        response.begin()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def _head(sent: Case, host: str) -> bytes:
    names = {name for name, _ in sent.headers}
    headers = [*sent.headers]
    if "host" not in names:
        headers.append(("host", host))
    if "connection" not in names:
        headers.append(("connection", "close"))
    if not names & {"content-length", "transfer-encoding"}:
        length = ("transfer-encoding", "chunked") if sent.pieces else ("content-length", str(len(sent.body)))
        headers += [length] if sent.body or sent.method == "POST" else []
    lines = [f"{sent.method} {sent.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode()


def _parts(sent: Case) -> Iterator[bytes]:
    body = sent.body if sent.cut is None else sent.body[: sent.cut]
    if not sent.pieces:
        yield body
        return
    size = max(1, -(-len(body) // sent.pieces))
    for start in range(0, len(body), size):
        chunk = body[start : start + size]
        yield b"%x\r\n%b\r\n" % (len(chunk), chunk)
    if sent.cut is None:
        yield b"0\r\n\r\n"


# -- what an answer must be


def complaint(sent: Case, answer: Answer) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    try:
        if answer.status >= 500 or answer.status == 429:
            _check_refusal(answer)
        elif answer.status >= 400:
            _check_error(sent, answer)
        elif answer.headers.get("content-type", "").startswith("text/event-stream"):
            _check_stream(sent.path, answer.body)
        elif answer.headers.get("content-type", "").startswith("application/json") and sent.method != "HEAD":
            strict_json(answer.body)
    except (AssertionError, LookupError, TypeError, ValueError) as error:
        return f"{answer.status} {type(error).__name__}: {error}; {answer.body[-500:]!r}"
    return None


def _check_refusal(answer: Answer) -> None:
    """A server that is busy says so, and when to come back."""
    assert answer.status in (429, 503), "a server error"
    error = strict_json(answer.body)["error"]
    assert error.get("code") in (*BUSY, None), "a refusal of another kind"
    assert error.get("code") or error["type"] in ("rate_limit_error", "overloaded_error"), "a refusal of another kind"
    assert int(answer.headers["retry-after"]) > 0


def _check_error(sent: Case, answer: Answer) -> None:
    if sent.method == "HEAD" or (sent.malformed and answer.headers.get("content-type", "").startswith("text/plain")):
        return
    found = strict_json(answer.body)
    assert isinstance(found["error"]["message"], str), "an error without a message"
    assert len(found["error"]["message"]) > 5, "an error without a message"
    if sent.path.startswith("/v1/messages"):
        assert found["type"] == "error", "not Anthropic's form"


def _check_stream(path: str, body: bytes) -> None:
    text = body.decode("utf-8")
    assert text.endswith("\n\n"), "the stream broke off"
    events = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    if path in ("/v1/chat/completions", "/v1/completions"):
        assert events.pop() == "[DONE]", "the stream has no end"
    found = [strict_json(each) for each in events]
    last = found[-1]
    if path == "/v1/messages":
        assert last["type"] in ("message_stop", "error"), "the stream has no end"
    if path == "/v1/responses":
        assert last["type"] in LAST_EVENTS, "the stream has no end"
    for each in found:
        _check_failure(each.get("error"))
        _check_failure((each.get("response") or {}).get("error"))


def _check_failure(error: dict[str, Any] | None) -> None:
    """A stream may end in an error, such as a grammar that takes too long; not in one of the server's own."""
    if error is not None:
        kind = error.get("type", error.get("code"))
        assert kind in ("invalid_request_error", "invalid_prompt"), f"the stream failed: {error}"


def strict_json(text: bytes | str) -> Any:
    """JSON as others read it: UTF-8, without NaN and infinities."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, parse_constant=refuse)


def main(url: str, first: str, end: str, step: str) -> None:
    os.nice(10)  # the server and whoever watches it come first
    for number in range(int(first), int(end), int(step)):
        print(json.dumps(asdict(attempt(url, case(number)))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
