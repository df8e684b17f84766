"""A server of known speed that writes down what it truly did: when each chunk left, with how many tokens.

Its own record is the truth the reported figures are held against, so a busy machine moves both. With a `VirtualClock`
no time passes at all: the mock turns the clock itself, after the client has stamped what was sent before.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from statistics import median
from typing import Any

from aiohttp import web


class VirtualClock:
    def __init__(self) -> None:
        self.now, self.reads = 1000.0, 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now


@dataclass(frozen=True)
class Behaviour:
    """What the server does to a request."""

    ttft_s: float = 0.2
    steps_per_s: float = 25.0
    chunks: int = 40  # that carry tokens
    per_chunk: tuple[int, ...] = (1,)  # tokens in each, over and over
    first_chunk: int = 1  # tokens in the very first
    role_first: float | None = None  # a chunk that only names the role, so long before the first token
    reasoning_chunks: int = 0  # the first so many carry reasoning
    tool_call: bool = False
    ids: bool = True
    usage: bool = True
    usage_factor: float = 1.0  # how wrong it is
    continuous: bool = False
    speculation: bool = True  # per response
    assumed: float | None = None  # tokens a step, if the server says that it accepts drafts unseen
    metrics: bool = False  # counters at /metrics
    foreign_tokens: int = 0  # that somebody else generates meanwhile
    tokenize: bool = True
    error_every: int = 0  # each nth request is refused
    error_status: int = 503
    error_text: str = "the queue is full"
    error_in_stream: bool = False
    close_after: int | None = None  # chunks, in each third request
    stall_at: int | None = None
    stall_s: float = 0.0
    hangs: bool = False
    looping: bool = False
    cached_share: float = 0.0
    strict: bool = False  # refuses fields OpenAI does not know


@dataclass
class Truth:
    """One request as the server saw it."""

    received: float
    sent: list[tuple[float, int]] = field(default_factory=list)  # when, how many tokens
    prompt_tokens: int = 0
    failed: bool = False

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.sent)

    @property
    def ttft(self) -> float:
        return self.sent[0][0] - self.received

    @property
    def seconds(self) -> float:
        return self.sent[-1][0] - self.sent[0][0]

    @property
    def decode(self) -> float:
        return (self.tokens - self.sent[0][1]) / self.seconds

    @property
    def steps(self) -> float:
        return (len(self.sent) - 1) / self.seconds

    @property
    def gaps(self) -> list[float]:
        """Seconds each token after the first chunk took."""
        return [
            (at - before) / tokens
            for (before, _), (at, tokens) in zip(self.sent, self.sent[1:], strict=False)
            for _ in range(tokens)
        ]


class Mock:
    def __init__(self, behaviour: Behaviour, clock: VirtualClock | None = None) -> None:
        self.behaviour, self.clock = behaviour, clock
        self.truths: list[Truth] = []
        self.asked: list[dict[str, Any]] = []
        self.url = ""

    def time(self) -> float:
        return self.clock.now if self.clock else time.monotonic()

    @asynccontextmanager
    async def running(self) -> Any:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = "http://{}:{}".format(*runner.addresses[0][:2])
        try:
            yield self
        finally:
            await runner.cleanup()

    @property
    def good(self) -> list[Truth]:
        return [truth for truth in self.truths if not truth.failed]

    def forget(self) -> None:
        """What came so far was warm-up."""
        self.truths.clear()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "mock", "owned_by": "mock", "max_model_len": 200_000}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.behaviour.tokenize:
            raise web.HTTPNotFound(text="no such route")
        body = await request.json()
        return web.json_response({"count": prompt_length(body)})

    async def _metrics(self, _: web.Request) -> web.Response:
        if not self.behaviour.metrics:
            raise web.HTTPNotFound(text="no such route")
        steps = sum(len(truth.sent) - 1 for truth in self.truths if truth.sent)
        tokens = sum(truth.tokens for truth in self.truths)
        accepted = tokens - steps - sum(bool(truth.sent) for truth in self.truths)
        lines = {
            'vllm:spec_decode_num_drafts_total{engine="0"}': steps,
            'vllm:spec_decode_num_accepted_tokens_total{engine="0"}': accepted,
            'vllm:generation_tokens_total{engine="0"}': tokens + len(self.truths) * self.behaviour.foreign_tokens,
        }
        return web.Response(text="# HELP\n" + "".join(f"{name} {value:.1f}\n" for name, value in lines.items()))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body, how = await request.json(), self.behaviour
        self.asked.append(body)
        unknown = [key for key in ("return_token_ids",) if key in body]
        unknown += [key for key in body.get("stream_options", ()) if key == "continuous_usage_stats"]
        if how.strict and unknown:
            refusal = {"error": {"message": f"Unrecognized request argument supplied: {unknown[0]}"}}
            return web.json_response(refusal, status=400)
        if body.get("stream") and body.get("max_tokens") == 1 and how.error_every != 1:  # what may be asked for
            return web.Response(text="data: [DONE]\n\n", content_type="text/event-stream")
        if not body.get("stream") and how.error_every != 1:  # a probe for the length of a prompt
            return web.json_response({"usage": {"prompt_tokens": prompt_length(body), "completion_tokens": 1}})
        truth = Truth(self.time(), prompt_tokens=prompt_length(body))
        self.truths.append(truth)
        number = len(self.truths)
        if how.error_every and number % how.error_every == 0 and not how.error_in_stream:
            truth.failed = True
            error = {"error": {"message": how.error_text, "type": "overloaded", "code": how.error_status}}
            return web.json_response(error, status=how.error_status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._stream(request, response, truth, number)
        return response

    async def _stream(self, request: web.Request, response: web.StreamResponse, truth: Truth, number: int) -> None:
        how = self.behaviour
        if how.role_first is not None:
            await self._pause(how.ttft_s - how.role_first)
            await self._send(response, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        await self._pause(how.role_first if how.role_first is not None else how.ttft_s)
        if how.hangs:
            truth.failed = True
            await asyncio.sleep(60)
        sizes = [how.first_chunk, *islice(cycle(how.per_chunk), how.chunks - 1)]
        for place, size in enumerate(sizes):
            if place:
                due = truth.sent[-1][0] + 1 / how.steps_per_s + (how.stall_s if place == how.stall_at else 0)
                await self._pause(due - self.time())
            if how.close_after == place and number % 3 == 0:
                truth.failed = True
                assert request.transport is not None
                request.transport.abort()
                return
            if how.error_in_stream and how.error_every and number % how.error_every == 0 and place == 3:
                truth.failed = True
                await self._send(response, {"error": {"message": how.error_text}})
                return
            chunk = {"choices": [{"index": 0, "delta": self._delta(truth, place, size)}]}
            if how.ids:
                chunk["choices"][0]["token_ids"] = list(range(truth.tokens, truth.tokens + size))
            if how.continuous:
                chunk["usage"] = self._usage(truth, truth.tokens + size)  # type: ignore[assignment]
            truth.sent.append((self.time(), size))
            await self._send(response, chunk)
        finish = "tool_calls" if how.tool_call else "stop"
        await self._send(response, {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        last: dict[str, Any] = {"choices": []}
        if how.usage:
            last["usage"] = self._usage(truth, truth.tokens)
        if how.speculation:
            steps = len(truth.sent) - (how.first_chunk == 1)
            accepted = truth.tokens - 1 - steps
            last["metrics"] = {"speculative_decoding": {"num_spec_steps": steps, "num_accepted_draft_tokens": accepted}}
            if how.assumed is not None:
                last["metrics"]["speculative_decoding"]["acceptance_assumed"] = how.assumed
        if len(last) > 1:
            await self._send(response, last)
        await response.write(b"data: [DONE]\n\n")

    def _usage(self, truth: Truth, tokens: int) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": truth.prompt_tokens,
            "completion_tokens": round(tokens * self.behaviour.usage_factor),
        }
        if self.behaviour.cached_share:
            usage["prompt_tokens_details"] = {"cached_tokens": int(truth.prompt_tokens * self.behaviour.cached_share)}
        return usage

    def _delta(self, truth: Truth, place: int, size: int) -> dict[str, Any]:
        how = self.behaviour
        words = ["again"] * size if how.looping else [f"w{truth.tokens + i:05}" for i in range(size)]
        text = "".join(f" {word}" for word in words)
        if place < how.reasoning_chunks:
            return {"reasoning_content": text}
        if how.tool_call:
            if place == how.reasoning_chunks:
                function = {"name": "read_file", "arguments": '{"path": "'}
                return {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}]}
            closing = '"}' if place == how.chunks - 1 else ""
            return {"tool_calls": [{"index": 0, "function": {"arguments": text + closing}}]}
        return {"content": text}

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        mark = self.clock.reads if self.clock else 0
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        while self.clock and self.clock.reads == mark:
            await asyncio.sleep(0)  # until the client has stamped it

    async def _pause(self, seconds: float) -> None:
        if self.clock:
            self.clock.now += max(seconds, 0.0)
        elif seconds > 0:
            await asyncio.sleep(seconds)


def prompt_length(body: dict[str, Any]) -> int:
    """A token is a word here; the template adds three per message."""
    if "prompt" in body:
        return len(str(body["prompt"]).split())
    tools = len(json.dumps(body.get("tools", "")).split())
    said = [
        str(message.get("content") or "") + json.dumps(message.get("tool_calls", "")) for message in body["messages"]
    ]
    return tools + sum(len(text.split()) + 3 for text in said)


def percentile(values: Sequence[float], share: float) -> float:
    """Written out, to be independent of what is tested."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def expected(truths: Sequence[Truth]) -> Iterator[tuple[str, float]]:
    """What a report should say of these requests."""
    gaps = [gap for truth in truths for gap in truth.gaps]
    yield "decode_tokens_per_s", median(truth.decode for truth in truths)
    yield "steps_per_s", median(truth.steps for truth in truths)
    yield "end_to_end_tokens_per_s", median(truth.tokens / (truth.ttft + truth.seconds) for truth in truths)
    for share, name in ((0.5, "p50"), (0.95, "p95")):
        yield f"ttft_s.{name}", percentile([truth.ttft for truth in truths], share)
    for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99")):
        yield f"itl_s.{name}", percentile(gaps, share)


async def _serve(behaviour: Behaviour) -> None:
    """In a process of its own: the address on stdout, and on each further line what was asked so far."""
    mock = Mock(behaviour)
    async with mock.running():
        print(mock.url, flush=True)
        while True:
            await asyncio.sleep(0.05)
            print(len(mock.asked), flush=True)


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    settings["per_chunk"] = tuple(settings.get("per_chunk", (1,)))
    asyncio.run(_serve(Behaviour(**settings)))
