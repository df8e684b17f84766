"""The OpenAI endpoints: what a stream says is what the whole says, and every option does what it is for."""

import asyncio
import math
import socket
from typing import Any

import pytest

from stoker.server.lifecycle.run import listen
from tests.server.running import NO_THINK, Running, chat_body, text_of

JSON = "Read this note and answer with JSON only. Keys: name, city.\n\nAnna Kovács called from Győr."


def test_a_stream_equals_the_whole_answer_and_counts_its_tokens(server: Running) -> None:
    body = chat_body(JSON, max_tokens=40, temperature=0.8, seed=5, return_token_ids=True)
    whole = server.chat(JSON, max_tokens=40, temperature=0.8, seed=5, return_token_ids=True)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(server.stream("/v1/chat/completions", {**body, "stream_options": options}))
    choice = whole["choices"][0]
    assert text_of(chunks) == choice["message"]["content"]
    tokens = [token for chunk in chunks for each in chunk["choices"] for token in each["token_ids"]]
    assert tokens == choice["token_ids"]
    assert len(tokens) == whole["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"]
    assert chunks[-1]["choices"] == []
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert whole["usage"]["prompt_tokens"] == len(whole["prompt_token_ids"])
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert [each["finish_reason"] for chunk in chunks for each in chunk["choices"]][-1] == choice["finish_reason"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


def test_speculation_is_reported_with_every_response(server: Running) -> None:
    whole = server.chat(JSON, max_tokens=48, temperature=0)
    found = whole["metrics"]["speculative_decoding"]
    assert found["num_draft_tokens"] >= found["num_accepted_draft_tokens"] > 0
    assert sum(found["acceptance_histogram"].values()) == found["num_spec_steps"]
    right = sum(int(count) * steps for count, steps in found["acceptance_histogram"].items())
    assert right == found["num_accepted_draft_tokens"]
    assert found["mean_acceptance_length"] == pytest.approx(1 + right / found["num_spec_steps"])
    assert found["draft_acceptance_rate"] == pytest.approx(right / found["num_draft_tokens"])
    last = list(server.stream("/v1/chat/completions", chat_body(JSON, max_tokens=48, temperature=0)))[-1]
    assert last["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    tokens, steps = whole["usage"]["completion_tokens"], whole["metrics"]["steps"]
    assert whole["metrics"]["accepted_per_step"] == pytest.approx((tokens - 1) / steps)


def test_a_request_without_drafts_has_the_same_tokens(server: Running) -> None:
    settings = {"max_tokens": 48, "temperature": 0.7, "seed": 3, "return_token_ids": True}
    drafted, plain = (server.chat(JSON, **settings, draft=draft) for draft in (True, False))
    assert drafted["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    assert drafted["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_drafts_are_shown_where_asked(server: Running) -> None:
    chunks = list(
        server.stream("/v1/chat/completions", chat_body(JSON, max_tokens=48, return_drafts=True, temperature=0))
    )
    drafts = [choice["drafts"] for chunk in chunks for choice in chunk["choices"] if "drafts" in choice]
    stats = chunks[-1]["metrics"]["speculative_decoding"]
    assert sum(each["accepted"] for each in drafts) == stats["num_accepted_draft_tokens"]
    rejected = sum(len(each["rejected"]) for each in drafts)
    assert rejected <= stats["num_draft_tokens"] - stats["num_accepted_draft_tokens"]
    assert all(each["accepted"] <= len(each["tokens"]) for each in drafts)


def test_the_second_turn_is_cached(server: Running) -> None:
    said = "Tell me about the invoice. " * 30
    first = server.chat(said, max_tokens=2, temperature=0)
    again = server.chat(said, max_tokens=2, temperature=0)
    assert first["choices"] == again["choices"]
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 64 <= cached < again["usage"]["prompt_tokens"]


def test_a_thought_is_told_apart(server: Running) -> None:
    body = chat_body("hello", max_tokens=30, temperature=0, chat_template_kwargs={})
    whole = server.post("/v1/chat/completions", body).json()
    message = whole["choices"][0]["message"]
    assert message["reasoning_content"]
    assert "<think>" not in message["reasoning_content"] + message["content"]
    assert "</think>" not in message["reasoning_content"] + message["content"]
    assert 0 < whole["usage"]["completion_tokens_details"]["reasoning_tokens"] < whole["usage"]["completion_tokens"]
    chunks = list(server.stream("/v1/chat/completions", body))
    assert text_of(chunks, "reasoning_content") == message["reasoning_content"]
    assert text_of(chunks) == message["content"]


def test_choices_seeds_and_temperature(server: Running) -> None:
    once = server.chat(n=3, seed=9, temperature=1.0, max_tokens=10)
    again = server.chat(n=3, seed=9, temperature=1.0, max_tokens=10)
    texts = [choice["message"]["content"] for choice in once["choices"]]
    assert texts == [choice["message"]["content"] for choice in again["choices"]]
    assert len(set(texts)) > 1
    assert once["usage"]["completion_tokens"] == 30 or "stop" in {each["finish_reason"] for each in once["choices"]}
    chunks = list(server.stream("/v1/chat/completions", chat_body(n=3, seed=9, temperature=1.0, max_tokens=10)))
    for place, text in enumerate(texts):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == place]
        assert "".join(choice["delta"].get("content") or "" for choice in mine) == text


@pytest.mark.parametrize("streamed", [False, True])
def test_stop_strings_end_the_text_before_them(server: Running, streamed: bool) -> None:
    whole = server.chat(JSON, max_tokens=40, temperature=0)["choices"][0]["message"]["content"]
    stop = whole[6:9]
    if streamed:
        chunks = list(server.stream("/v1/chat/completions", chat_body(JSON, max_tokens=40, temperature=0, stop=stop)))
        text, last = text_of(chunks), chunks[-1]["choices"][0]
    else:
        last = server.chat(JSON, max_tokens=40, temperature=0, stop=[stop, "never"])["choices"][0]
        text = last["message"]["content"]
    assert text == whole[: whole.index(stop)]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


def test_logprobs(server: Running) -> None:
    body = chat_body(max_tokens=6, logprobs=True, top_logprobs=3, temperature=0, ignore_eos=True, return_token_ids=True)
    whole = server.post("/v1/chat/completions", body).json()["choices"][0]
    entries = whole["logprobs"]["content"]
    assert len(entries) == 6
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] == pytest.approx(max(top["logprob"] for top in entry["top_logprobs"]))  # greedy
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert sum(math.exp(top["logprob"]) for top in entry["top_logprobs"]) <= 1.0 + 1e-6
    chunks = list(server.stream("/v1/chat/completions", body))
    streamed = [each for chunk in chunks for choice in chunk["choices"] for each in choice["logprobs"]["content"]]
    assert streamed == entries


def test_extras_of_vllm(server: Running) -> None:
    """min_tokens, ignore_eos and stop_token_ids; top_k 1 is greedy; a logit bias of -100 bars a token."""
    greedy = server.chat(temperature=0, max_tokens=8, return_token_ids=True)["choices"][0]["token_ids"]
    one = server.chat(temperature=1.5, top_k=1, max_tokens=8, return_token_ids=True)["choices"][0]["token_ids"]
    assert one == greedy
    longer = server.chat(temperature=0, max_tokens=60, min_tokens=60)["usage"]["completion_tokens"]
    assert longer == 60
    assert server.chat(temperature=0, max_tokens=60, ignore_eos=True)["usage"]["completion_tokens"] == 60
    stopped = server.chat(temperature=0, max_tokens=8, stop_token_ids=[greedy[2]], return_token_ids=True)["choices"][0]
    assert stopped["token_ids"] == greedy[:3]
    other = server.chat(temperature=0, max_tokens=8, logit_bias={str(greedy[0]): -100}, return_token_ids=True)
    assert greedy[0] not in other["choices"][0]["token_ids"]
    repeated = server.chat(temperature=0, max_tokens=8, repetition_penalty=1.8, presence_penalty=0.5, min_p=0.05)
    assert repeated["usage"]["completion_tokens"] <= 8


def test_completions(server: Running) -> None:
    body: dict[str, Any] = {"prompt": ["def main():\n", "import "], "max_tokens": 8, "temperature": 0, "logprobs": 2}
    whole = server.post("/v1/completions", body).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    for choice in whole["choices"]:
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert choice["logprobs"]["text_offset"][0] == 0
    chunks = list(server.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}}))
    for place, choice in enumerate(whole["choices"]):
        mine = [each for chunk in chunks for each in chunk["choices"] if each["index"] == place]
        assert "".join(each["text"] for each in mine) == choice["text"]
    assert chunks[-1]["usage"] == whole["usage"]
    tokens = server.post("/tokenize", {"prompt": "import "}).json()["tokens"]
    given = server.post("/v1/completions", {"prompt": tokens, "max_tokens": 8, "temperature": 0, "echo": True}).json()
    assert given["choices"][0]["text"] == "import " + whole["choices"][1]["text"]
    assert server.post("/v1/completions", {"prompt": "a"}).json()["usage"]["completion_tokens"] <= 16


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_train",
            "description": "Find a train",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "seats": {"type": "integer"}},
                "required": ["city", "seats"],
            },
        },
    },
    {"type": "function", "function": {"name": "get_time", "description": "Tell the time"}},
]


def test_tool_choice(server: Running) -> None:
    def asked(choice: Any, **more: Any) -> dict[str, Any]:
        given = server.chat("A train to Győr", tools=TOOLS, tool_choice=choice, max_tokens=120, temperature=0, **more)
        found: dict[str, Any] = given["choices"][0]
        return found

    named = asked({"type": "function", "function": {"name": "get_time"}})
    assert [call["function"] for call in named["message"]["tool_calls"]] == [{"name": "get_time", "arguments": "{}"}]
    assert named["finish_reason"] == "tool_calls"
    assert named["message"]["content"] is None
    assert len(asked("required", parallel_tool_calls=False)["message"]["tool_calls"]) == 1
    none = asked("none")
    assert "tool_calls" not in none["message"]
    assert "<tool_call>" not in none["message"]["content"]
    body = chat_body("A train to Győr", tools=TOOLS, tool_choice="required", max_tokens=120, temperature=0)
    chunks = list(server.stream("/v1/chat/completions", body))
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for call in chunk["choices"][0]["delta"].get("tool_calls", []):
            calls.setdefault(call["index"], []).append(call["function"].get("arguments", ""))
    whole = asked("required")["message"]["tool_calls"]
    assert ["".join(parts) for parts in calls.values()] == [call["function"]["arguments"] for call in whole]


def test_a_conversation_with_a_tool_result(server: Running) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "get_train", "arguments": '{"city": "Győr"}'}}
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "A train to Győr"}]},
        {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "08:10"},
    ]
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 8, "chat_template_kwargs": NO_THINK}
    assert server.post("/v1/chat/completions", body).status_code == 200
    given = server.post("/tokenize", {"messages": messages, "tools": TOOLS, "return_token_strs": True}).json()
    text = "".join(given["token_strs"])
    assert given["count"] == len(given["tokens"])
    assert "<function=get_train>\n<parameter=city>\nGyőr\n</parameter>" in text
    assert "<tool_response>\n08:10\n</tool_response>" in text
    assert text == server.post("/detokenize", {"tokens": given["tokens"]}).json()["prompt"]


def test_about(server: Running) -> None:
    models = server.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["demo", "other"]
    assert models[0]["max_model_len"] == 8192
    assert server.get("/v1/models/other").json()["id"] == "other"
    assert server.get("/v1/models/third").status_code == 404
    assert server.chat(model="other")["model"] == "demo"
    assert server.get("/health").json() == {"status": "ready"}
    assert server.get("/ready").json()["ready"] is True
    assert server.get("/version").json()["version"]


def test_metrics_follow_what_happens(server: Running) -> None:
    names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:spec_decode_num_draft_tokens_total")
    before = server.gauges()
    whole = server.chat(JSON, max_tokens=30, temperature=0)
    after = server.gauges()
    grown = [after[name] - before[name] for name in names]
    speculative = whole["metrics"]["speculative_decoding"]
    usage = whole["usage"]
    assert grown == [usage["completion_tokens"], usage["prompt_tokens"], speculative["num_draft_tokens"]]
    text = server.get("/metrics").text
    for name in (
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="demo",position="0"}',
        'stoker:spec_decode_num_draft_tokens_per_pos_total{engine="0",model_name="demo",position="0"}',
        'stoker:step_depth_total{depth="0"',
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:prefix_cache_hits_total",
    ):
        assert name in text
    for name in (
        "stoker:distinct_experts_per_step",
        "stoker:step_seconds_mean",
        "stoker:kv_bytes",
        "stoker:state_bytes",
    ):
        assert after[name] > 0


def test_events_do_not_wait_for_each_other_on_the_wire() -> None:
    """Otherwise the first token waits for the acknowledgement of the headers, 40 ms with most clients."""

    async def nodelay() -> int:
        found: list[int] = []

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                connection = transport.get_extra_info("socket")
                found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                transport.close()

        listening = listen("127.0.0.1", 0)
        server = await asyncio.get_running_loop().create_server(Accepted, sock=listening)
        async with server:
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            await reader.read()
            writer.close()
        return found[0]

    assert asyncio.run(nodelay()) == 1
