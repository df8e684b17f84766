"""What is wrong with a request is told with 4xx, a reason and the numbers; never with 5xx, never with silence."""

import contextlib
import http.client
import json
from typing import Any

import httpx2 as httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.server.running import Running, chat_body
from tests.support.extent import ALL

CASES = 2000 if ALL else 150


def raw(server: Running, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    sent = {"content-type": "application/json", **headers}
    return httpx.post(server.url + path, content=body, headers=sent, timeout=120.0)


def reason(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "the body"),
        (b"{", 400, "no JSON"),
        (b'{"messages": ', 400, "no JSON"),
        (b"[1, 2]", 400, "the body"),
        (b'"text"', 400, "the body"),
        (b'\xff\xfe{"messages": []}', 400, "no JSON"),
        (b'{"messages": [{"role": "user", "content": "\xc3"}]}', 400, "UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "messages[0] is not text"),
        (b"[" * 100_000, 400, "nested"),
        (b'{"a":' * 50_000, 400, "nested"),
        (b'{"messages": []}', 400, "empty"),
        (b'{"messages": [{"role": "king", "content": "x"}]}', 400, "role"),
        (b'{"messages": [{"role": "user", "content": 5}]}', 400, "content"),
        (b'{"messages": "hello"}', 400, "list"),
        (b"{}", 400, "messages"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}', 400, "no user message"),
    ],
)
def test_bodies(server: Running, body: bytes, status: int, words: str) -> None:
    response = raw(server, body)
    assert response.status_code == status, response.text
    assert words in reason(response), response.text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_tokens": -5}, "max_tokens is -5, expected at least 1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": "many"}, "integer"),
        ({"max_tokens": True}, "integer"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": "hot"}, "number"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -7}, "top_k is -7"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"seed": 1 << 70}, "64 bits"),
        ({"n": 0}, "n is 0, expected 1 to 64"),
        ({"n": 1000}, "n is 1000"),
        ({"min_tokens": 50}, "min_tokens is 50"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 100}, "100 strings"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs is 50"),
        ({"top_logprobs": 2}, "needs logprobs"),
        ({"logit_bias": {"a": 1}}, "no token id"),
        ({"top_k": 1 << 63}, "top_k is 9223372036854775808, expected 0"),
        ({"temperature": 1e39}, "temperature is 1e+39, expected 0"),
        ({"logit_bias": {"99999999": 1}}, "outside the vocabulary of 4,608"),
        ({"logit_bias": {"5": 1000}}, "-100 to 100"),
        ({"stop_token_ids": [-1]}, "outside the vocabulary"),
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "called 'a b'"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "no schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "teapot"}}}}, "teapot"),
        ({"functions": [{"name": "a"}]}, "tools"),
        ({"chat_template": "{{ 1 }}"}, "only the model's own"),
        ({"chat_template_kwargs": {"tokenize": True}}, "may not set tokenize"),
        ({"modalities": ["audio"]}, "text only"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21, expected 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"prompt_logprobs": 1, "stream": True}, "not with a stream"),
        ({"use_beam_search": True}, "beam"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "exactly one"),
        ({"structured_outputs": {"regex": "("}}, "cannot be used"),
        ({"stream_options": {"include_usage": "yes"}}, "include_usage"),
    ],
)
def test_values(server: Running, more: dict[str, Any], words: str) -> None:
    response = server.post("/v1/chat/completions", chat_body(**more))
    assert response.status_code == 400, response.text
    assert words in reason(response), response.text


def test_images_and_other_parts(server: Running) -> None:
    for part in (
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "input_audio"},
        {"text": 5},
    ):
        messages = [{"role": "user", "content": [{"type": "text", "text": "See:"}, part]}]
        response = server.post("/v1/chat/completions", {"messages": messages})
        assert response.status_code == 400
        assert "content[1]" in reason(response)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/health", "/nowhere"])
def test_an_answer_is_not_lost_while_the_body_is_still_sent(server: Running, path: str) -> None:
    """A connection closed over unread bytes is reset, and the reset can overtake the answer."""
    for _ in range(10):
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60.0)
        with contextlib.closing(connection):
            connection.request("POST", path, b"x" * (20 << 20), {"content-type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 413
            assert "16,777,216" in json.loads(answer.read())["error"]["message"]


def test_sizes(server: Running) -> None:
    long = "word " * 250_000
    response = server.post("/v1/chat/completions", chat_body(long))
    assert response.status_code == 400
    assert "maximum context length is 8192 tokens" in reason(response)
    tokens = server.post("/tokenize", {"prompt": long}).json()["count"]
    assert tokens > 200_000
    assert f"the prompt has {tokens // 1000}" in reason(response)
    big = raw(server, b'{"messages": "' + b"x" * (17 << 20) + b'"}')
    assert big.status_code == 413
    assert "16,777,216" in reason(big)

    def endless() -> Any:
        for _ in range(40):
            yield b"x" * (1 << 20)

    cut = httpx.post(server.url + "/v1/completions", content=endless(), timeout=60.0)
    assert cut.status_code == 413  # no length is announced: it is cut off at the limit
    many = [{"role": "user", "content": "x"}] * 5000
    response = server.post("/v1/chat/completions", {"messages": many})
    assert response.status_code == 400
    assert "5,000 entries" in reason(response)


def test_paths_and_methods(server: Running) -> None:
    assert server.get("/v1/nothing").status_code == 404
    assert server.get("/v1/chat/completions").status_code == 405
    assert server.get("/page/..%2fapp.py").status_code == 404
    assert server.get("/page/%2e%2e/app.py").status_code == 404
    assert server.post("/detokenize", {"tokens": [-1]}).status_code == 400
    assert server.post("/detokenize", {"tokens": [1 << 80]}).status_code == 400
    assert server.post("/tokenize", {}).status_code == 400
    assert server.post("/v1/completions", {"prompt": []}).status_code == 400
    assert server.post("/v1/completions", {"prompt": [99999]}).status_code == 400
    assert server.post("/v1/completions", {"prompt": ""}).status_code == 400
    response = server.post("/v1/messages", {"messages": [{"role": "user", "content": "x"}]})
    assert response.status_code == 400
    assert response.json()["type"] == "error"
    assert "max_tokens" in response.json()["error"]["message"]


def test_more_answers_than_there_is_room_for(server: Running) -> None:
    """4 may run and 64 wait."""
    body = {"prompt": ["x"] * 64, "n": 2, "max_tokens": 1}
    response = server.post("/v1/completions", body)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) > 0
    assert "64 wait" in reason(response)


def test_no_request_of_the_described_kinds_makes_a_server_error(shared: Running) -> None:
    """schemathesis makes requests up from the server's own OpenAPI document, sound ones and broken ones."""
    schema = schemathesis.openapi.from_dict(_bounded(shared.get("/openapi.json").json()))
    operations: list[Any] = [found.ok() for found in list[Any](schema.get_all_operations())]
    bodies = [operation for operation in operations if operation.method.upper() == "POST"]
    sent: dict[int, int] = {}
    with httpx.Client(base_url=shared.url, timeout=120.0) as client:
        for operation in operations:
            # a few more than their share: some kinds of request are soon exhausted
            share = CASES * 6 // (5 * len(bodies)) if operation in bodies else 5

            @settings(
                max_examples=share,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(
                case=operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
                | operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
            )
            def attempt(case: Any) -> None:
                response = _send(client, case)
                sent[response.status_code] = sent.get(response.status_code, 0) + 1
                assert response.status_code < 500, (response.status_code, response.text[:500], case.as_curl_command())

            attempt()
    print(f"{sum(sent.values())} cases: {dict(sorted(sent.items()))}")
    assert sum(sent.values()) >= CASES
    shared.until_idle()


def _send(client: httpx.Client, case: Any) -> httpx.Response:
    sent = case.as_transport_kwargs(base_url=str(client.base_url))
    body = sent.get("json")
    content = json.dumps(body).encode("utf-8", "surrogatepass") if body is not None else sent.get("data")
    headers = {**dict(sent.get("headers") or {}), "content-type": "application/json"}
    headers = {name: value for name, value in headers.items() if name.lower() not in ("host", "content-length")}
    return client.request(sent["method"], sent["url"], content=content, headers=headers, params=sent.get("params"))


def _bounded(document: dict[str, Any]) -> dict[str, Any]:
    """Answers kept short, so that cases are many, and of a model that is there, so that they get far."""
    for schema in document["components"]["schemas"].values():
        for name in schema.get("properties", {}):
            if name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "min_tokens"):
                schema["properties"][name] = {"type": "integer", "maximum": 3}
                schema.setdefault("required", [])
                if name.startswith("max_") and name not in schema["required"]:
                    schema["required"] = [*schema["required"], name]
            if name == "model":
                schema["properties"][name] = {"enum": ["demo", "none"]}
    return document
