"""Clients that others wrote run against the server unmodified: openai, anthropic, llama-benchy, vllm bench serve."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from pydantic import BaseModel

from stoker.demo import EMBEDDED, prompts
from tests.server.running import NO_THINK, Running

QUESTION: Any = [{"role": "user", "content": "A train to Győr, please."}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "seats": {"type": "integer"}},
    "required": ["city", "seats"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_train", "description": "Find", "parameters": PARAMETERS}}


class Train(BaseModel):
    city: str
    seats: int


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
        yield client


@pytest.fixture
def claude(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="any") as client:
        yield client


class TestOpenai:
    def test_chat(self, client: openai.OpenAI) -> None:
        whole = client.chat.completions.create(
            model="demo", messages=QUESTION, max_completion_tokens=10, temperature=0, logprobs=True, top_logprobs=2
        )
        assert whole.usage is not None
        assert whole.choices[0].logprobs is not None
        assert len(whole.choices[0].logprobs.content or []) == whole.usage.completion_tokens
        assert [model.id for model in client.models.list()] == ["demo", "other"]

    def test_chat_streaming(self, client: openai.OpenAI) -> None:
        given: Any = {"model": "demo", "messages": QUESTION, "max_completion_tokens": 200, "temperature": 0}
        given["extra_body"] = {"chat_template_kwargs": NO_THINK}
        whole = client.chat.completions.create(**given).choices[0].message.content
        with client.chat.completions.stream(**given, stream_options={"include_usage": True}) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert "content.delta" in kinds
        assert final.choices[0].message.content == whole
        assert final.usage is not None

    def test_tools(self, client: openai.OpenAI) -> None:
        given: Any = {"model": "demo", "messages": QUESTION, "tools": [TOOL], "tool_choice": "required"}
        given |= {"max_completion_tokens": 150, "temperature": 0, "parallel_tool_calls": False}
        (call,) = client.chat.completions.create(**given).choices[0].message.tool_calls or []
        assert call.type == "function"
        assert Train.model_validate_json(call.function.arguments)
        with client.chat.completions.stream(**given) as stream:
            pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
        assert len(pieces) > 1
        assert streamed.function.arguments == call.function.arguments
        answered: Any = [
            *QUESTION,
            {"role": "assistant", "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": "08:10"},
        ]
        after = client.chat.completions.create(model="demo", messages=answered, tools=[TOOL], max_completion_tokens=8)
        assert after.choices[0].finish_reason in ("stop", "length", "tool_calls")

    def test_structured_output(self, client: openai.OpenAI) -> None:
        parsed = client.chat.completions.parse(
            model="demo", messages=QUESTION, response_format=Train, max_completion_tokens=400, temperature=0
        )
        assert isinstance(parsed.choices[0].message.parsed, Train)

    def test_completions(self, client: openai.OpenAI) -> None:
        given: Any = {"model": "demo", "prompt": "def main():\n", "max_tokens": 12, "temperature": 0}
        whole = client.completions.create(**given).choices[0].text
        assert "".join(chunk.choices[0].text for chunk in client.completions.create(**given, stream=True)) == whole

    def test_responses(self, client: openai.OpenAI) -> None:
        given: Any = {"model": "demo", "input": "hello", "max_output_tokens": 24, "temperature": 0}
        whole = client.responses.create(**given)
        with client.responses.stream(**given) as stream:
            numbers = [event.sequence_number for event in stream]
            streamed = stream.get_final_response()
        assert numbers == list(range(len(numbers)))
        assert streamed.output_text == whole.output_text
        assert [item.type for item in whole.output] == ["reasoning", "message"]
        assert whole.usage is not None
        assert whole.usage.output_tokens_details.reasoning_tokens > 0
        cut = client.responses.create(**{**given, "max_output_tokens": 3})
        assert (cut.status, cut.incomplete_details and cut.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )

    def test_responses_with_tools_and_structure(self, client: openai.OpenAI) -> None:
        tool: Any = {"type": "function", "name": "get_train", "parameters": PARAMETERS, "strict": True}
        question: Any = {"role": "user", "content": "A train to Győr, please."}
        given: Any = {"model": "demo", "tools": [tool], "max_output_tokens": 150, "temperature": 0}
        with client.responses.stream(**given, input=[question], tool_choice="required") as stream:
            pieces = [event for event in stream if event.type == "response.function_call_arguments.delta"]
            first = stream.get_final_response()
        calls = [item for item in first.output if item.type == "function_call"]
        assert pieces
        assert all(Train.model_validate_json(call.arguments) for call in calls)
        history = [question, *(item.model_dump(exclude_none=True) for item in first.output)]
        outputs: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "08:10"} for call in calls]
        after = client.responses.create(**{**given, "max_output_tokens": 8}, input=[*history, *outputs])
        assert after.status in ("completed", "incomplete")
        parsed = client.responses.parse(
            model="demo", input="A train", text_format=Train, max_output_tokens=400, temperature=0
        )
        assert isinstance(parsed.output_parsed, Train)
        with pytest.raises(openai.BadRequestError, match="not kept"):
            client.responses.create(model="demo", input="x", previous_response_id="resp_1")

    def test_errors_are_the_clients_own(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'"):
            client.chat.completions.create(model="gpt-9", messages=QUESTION)
        long: Any = [{"role": "user", "content": "word " * 9000}]
        with pytest.raises(openai.BadRequestError, match="maximum context length is 8192 tokens") as refused:
            client.chat.completions.create(model="demo", messages=long)
        assert refused.value.code == "context_length_exceeded"


class TestAnthropic:
    def test_messages(self, claude: anthropic.Anthropic) -> None:
        given: Any = {
            "model": "demo",
            "max_tokens": 24,
            "messages": QUESTION,
            "extra_body": {"temperature": 0},
            "system": "Be short.",
        }
        whole = claude.messages.create(**given)
        with claude.messages.stream(**given) as stream:
            streamed = stream.get_final_message()
        assert [block.model_dump() for block in streamed.content] == [block.model_dump() for block in whole.content]
        assert streamed.stop_reason == whole.stop_reason
        assert streamed.usage.output_tokens == whole.usage.output_tokens
        counted = claude.messages.count_tokens(model="demo", messages=QUESTION, system="Be short.")
        assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)

    def test_thinking_and_stop_sequences(self, claude: anthropic.Anthropic) -> None:
        given: Any = {
            "model": "demo",
            "messages": [{"role": "user", "content": "hello"}],
            "extra_body": {"temperature": 0},
        }
        off = claude.messages.create(**given, max_tokens=24, thinking={"type": "disabled"})
        assert [block.type for block in off.content] == ["text"]
        on = claude.messages.create(**given, max_tokens=24, thinking={"type": "adaptive"})
        assert on.content[0].type == "thinking"
        text = off.content[0].text
        stopped = claude.messages.create(
            **given, max_tokens=24, thinking={"type": "disabled"}, stop_sequences=[text[3:5]]
        )
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[3:5])
        assert claude.messages.create(**given, max_tokens=2).stop_reason == "max_tokens"
        assert claude.messages.create(**given, max_tokens=20_000, thinking={"type": "disabled"}).stop_reason

    def test_structured_output(self, claude: anthropic.Anthropic) -> None:
        wanted: Any = {"format": {"type": "json_schema", "schema": PARAMETERS}}
        found = claude.messages.create(model="demo", max_tokens=400, messages=QUESTION, output_config=wanted)
        assert Train.model_validate_json(found.content[-1].text)  # type: ignore[union-attr]

    def test_tools(self, claude: anthropic.Anthropic) -> None:
        tool: Any = {"name": "get_train", "description": "Find", "input_schema": PARAMETERS}
        given: Any = {"model": "demo", "max_tokens": 150, "tools": [tool], "extra_body": {"temperature": 0}}
        choice: Any = {"type": "any", "disable_parallel_tool_use": True}
        with claude.messages.stream(**given, messages=QUESTION, tool_choice=choice) as stream:
            pieces = [event for event in stream if event.type == "input_json"]
            first = stream.get_final_message()
        (call,) = (block for block in first.content if block.type == "tool_use")
        assert first.stop_reason == "tool_use"
        assert len(pieces) > 1
        assert Train.model_validate(call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "08:10"}]}
        messages: Any = [
            *QUESTION,
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
        ]
        assert claude.messages.create(**{**given, "max_tokens": 8}, messages=messages).usage.output_tokens

    def test_errors_are_the_clients_own(self, claude: anthropic.Anthropic) -> None:
        with pytest.raises(anthropic.NotFoundError) as refused:
            claude.messages.create(model="claude-9", max_tokens=5, messages=QUESTION)
        assert refused.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        image: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x/y"}}]}]
        with pytest.raises(anthropic.BadRequestError, match="Could not process image"):
            claude.messages.create(model="demo", max_tokens=5, messages=image)


@pytest.fixture
def book(tmp_path: Path) -> Iterator[str]:
    """The address of a text that llama-benchy makes its prompts of."""
    (tmp_path / "book.txt").write_text("\n\n".join(prompts()["prose"]), encoding="utf-8")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/book.txt"
        server.shutdown()


def test_llama_benchy(server: Running, book: str, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "llama_benchy", "--base-url", f"{server.url}/v1", "--model", "demo"]
    command += ["--tokenizer", str(EMBEDDED), "--book-url", book, "--pp", "64", "--tg", "16", "--exact-tg"]
    command += ["--runs", "1", "--concurrency", "1", "2", "--skip-coherence", "--exit-on-first-fail"]
    command += ["--format", "json", "--save-result", str(result)]
    ran = subprocess.run(
        command, env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = json.loads(result.read_text())["benchmarks"]
    assert len(rows) == 2
    assert all(row["tg_throughput"]["mean"] > 0 for row in rows), rows


def test_the_request_shapes_of_vllm_bench_serve(server: Running) -> None:
    """What its client sends for completions and chat, with aiohttp as it does, and what it reads of the answer."""
    completion = {
        "model": "demo",
        "prompt": prompts()["prose"][0][:200],
        "repetition_penalty": 1.0,
        "max_tokens": 12,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }
    chat = {
        "model": "demo",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "max_completion_tokens": 12,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }

    async def read(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        chunks, usage = 0, {}
        headers = {"x-request-id": "bench-1"}
        async with session.post(server.url + path, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            text = (await response.read()).decode()
        messages = [message for message in text.split("\n\n") if message.strip()]
        assert messages[-1] == "data: [DONE]"
        for message in messages[:-1]:
            found = json.loads(message.removeprefix("data: "))
            if found["choices"]:
                chunks += 1
                assert isinstance(found["choices"][0].get("text", found["choices"][0].get("delta")), str | dict)
            elif found.get("usage"):
                usage = found["usage"]
        return chunks, usage

    async def both() -> list[tuple[int, dict[str, Any]]]:
        async with aiohttp.ClientSession() as session:
            asked = [read(session, "/v1/completions", completion), read(session, "/v1/chat/completions", chat)]
            return await asyncio.gather(*asked)

    for chunks, usage in asyncio.run(both()):
        assert 1 <= chunks <= 12
        assert usage["completion_tokens"] == 12
        assert usage["prompt_tokens"] > 5
