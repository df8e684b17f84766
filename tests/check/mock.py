"""A chat server that knows the right answers and gives a chosen share of wrong ones. A word is a token here."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

from aiohttp import web

from stoker.check import own
from stoker.check.items import Item
from stoker.check.suites import draw

Change = Callable[[Item], bool]


class KnowingServer:
    """Items are recognised by their messages; `wrong` says which get a wrong answer, `fails` which an error."""

    def __init__(self, items: list[Item], wrong: Change = lambda _: False, fails: Change = lambda _: False) -> None:
        self.items, self.wrong, self.fails = items, wrong, fails
        self.asked: list[dict[str, Any]] = []
        self.url, self.port = "", 0
        self.refuses_switch = False
        self.seconds = 0.0  # that an answer takes
        self.answers: dict[str, str] = {}  # by id, where the right answer does not follow from what is expected

    @asynccontextmanager
    async def running(self) -> AsyncIterator["KnowingServer"]:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.url = "http://{}:{}".format(*runner.addresses[0][:2])
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "knows", "owned_by": "test", "max_model_len": 200_000}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        said = body.get("prompt") or " ".join(str(message["content"]) for message in body["messages"])
        return web.json_response({"count": len(said.split())})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.refuses_switch and "chat_template_kwargs" in body:
            return web.json_response({"error": {"message": "unknown field chat_template_kwargs"}}, status=400)
        if body["max_tokens"] == 1:
            return web.json_response({"usage": {"prompt_tokens": 1, "completion_tokens": 1}, "choices": []})
        self.asked.append(body)
        item = self._item(body["messages"])
        if self.fails(item):
            return web.json_response({"error": {"message": "the queue is full"}}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(self.seconds)
        text, calls = await self.answer(item, body)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [
                {"index": place, "id": f"c{place}", "type": "function", "function": call}
                for place, call in enumerate(calls)
            ]
        usage = {"prompt_tokens": 1, "completion_tokens": len(json.dumps(delta).split())}
        for event in (
            {"choices": [{"index": 0, "delta": delta}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage, **self.told(body)},
        ):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def answer(self, item: Item, body: dict[str, Any]) -> tuple[str, list[dict[str, str]]]:
        if self.wrong(item):
            return "This is wrong.", []
        text, calls = right_answer(item)
        return (self.answers.get(item.id, text) if text else text), calls

    def told(self, body: dict[str, Any]) -> dict[str, Any]:
        """What else the last event says."""
        return {}

    def _item(self, messages: list[dict[str, Any]]) -> Item:
        text = str(messages[-1]["content"])
        for item in self.items:
            end = str(item.messages[-1]["content"]).partition("{text}")[2]
            if item.messages == messages or (item.filler and text.endswith(end)):
                return item
        raise AssertionError(f"nobody should ask {text[:200]}")


def right_answer(item: Item) -> tuple[str, list[dict[str, str]]]:
    if item.checker == "tool_calls":
        calls = [{"name": call["name"], "arguments": json.dumps(call["arguments"])} for call in item.expect]
        return "" if calls else "No tool is needed.", calls
    if item.checker == "json_fields":
        return json.dumps(item.expect, ensure_ascii=False), []
    return f"Answer: {item.expect}" if item.checker == "number" else f"It is {item.expect}.", []


def share(of: float, seed: str) -> Change:
    """The same items every time."""
    return lambda item: Random(f"{seed}/{item.id}").random() < of


async def _serve(suite: str, seconds: float, answers: dict[str, str], port: int) -> None:
    """In a process of its own: the address on stdout, then the number of an item's request on each line."""
    server = KnowingServer(
        draw(suite, "1", 60 if suite == "agent" else None) if not own.is_file(suite) else own.items(Path(suite))
    )
    server.seconds, server.answers, server.port = seconds, answers, port
    async with server.running():
        print(server.url, flush=True)
        told = 0
        while True:
            await asyncio.sleep(0.01)
            while told < len(server.asked):
                told += 1
                print(told, flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])))
