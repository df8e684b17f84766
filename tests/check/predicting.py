"""A server that predicts: a made-up distribution at every position of a text, told in one of the three ways."""

import re
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from aiohttp import web

VOCABULARY = 200
ALL_WAYS = ("prompt_logprobs", "echo", "logprobs")


class PredictingServer:
    """A word is a token. `noise` moves its predictions away from those of another server of the same `model`."""

    def __init__(
        self,
        noise: float = 0.0,
        seed: int = 0,
        ways: tuple[str, ...] = ALL_WAYS,
        tokenizes: bool = True,
        shift: int = 0,
        most: int = 20,
        fails: str = "",
    ) -> None:
        self.noise, self.seed, self.ways, self.tokenizes = noise, seed, ways, tokenizes
        self.shift, self.most, self.fails = shift, most, fails
        self.asked: list[dict[str, Any]] = []
        self.url = ""
        self.words: dict[int, str] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator["PredictingServer"]:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*runner.addresses[0][:2])
        try:
            yield self
        finally:
            await runner.cleanup()

    def ids(self, text: str) -> list[int]:
        found = []
        for word in re.findall(r"\S+\s*", text):
            token = (zlib.crc32(word.encode()) + self.shift) % VOCABULARY
            self.words[token] = word
            found.append(token)
        return found

    def logprobs(self, before: list[int]) -> np.ndarray:
        """Of all tokens, after these."""
        key = zlib.crc32(str(before[-3:]).encode())
        logits = np.random.default_rng(key).normal(0, 3.0, VOCABULARY)
        if self.noise:
            logits = logits + np.random.default_rng([key, 1 + self.seed]).normal(0, self.noise, VOCABULARY)
        return logits - np.log(np.exp(logits).sum())

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "predicts", "owned_by": "test", "max_model_len": 4096}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self.tokenizes or "prompt" not in body:
            return web.json_response({"error": {"message": "no such thing"}}, status=404)
        return web.json_response({"tokens": self.ids(body["prompt"])})

    async def _chat(self, _: web.Request) -> web.Response:
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        return web.json_response({"usage": usage, "choices": [{"message": {"content": "x"}}]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        prompt = body["prompt"] if isinstance(body["prompt"], list) else self.ids(body["prompt"])
        top = body.get("prompt_logprobs") or body.get("logprobs") or 0
        if top > self.most or (self.fails and self.fails in str(body["prompt"])):
            return web.json_response({"error": {"message": f"logprobs is {top}, at most {self.most}"}}, status=400)
        choice: dict[str, Any] = {"text": "x", "logprobs": None}
        tables = [self.logprobs(prompt[:place]) for place in range(1, len(prompt) + 1)]
        if "prompt_logprobs" in body and "prompt_logprobs" in self.ways:
            choice["prompt_logprobs"] = [None, *map(self._by_id, tables[:-1], prompt[1:], [top] * len(prompt))]
        elif body.get("echo") and "echo" in self.ways:
            texts = [f"<{token}>" for token in prompt]
            tops = [self._by_text(table, top) for table in tables]
            choice["logprobs"] = {"tokens": [*texts, "<0>"], "top_logprobs": [None, *tops]}
        elif "logprobs" in body and not body.get("echo") and "logprobs" in self.ways:
            listed = [{"id": token, "token": "?", "logprob": value} for token, value in _top(tables[-1], top)]
            choice["logprobs"] = {"content": [{"id": 0, "token": "?", "logprob": -1.0, "top_logprobs": listed}]}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 1}
        return web.json_response({"choices": [choice], "usage": usage})

    def _by_id(self, table: np.ndarray, token: int, top: int) -> dict[str, Any]:
        listed = {str(each): {"logprob": value, "decoded_token": "?"} for each, value in _top(table, top)}
        return {**listed, str(token): {"logprob": float(table[token]), "decoded_token": "?"}}

    def _by_text(self, table: np.ndarray, top: int) -> dict[str, float]:
        return {f"<{each}>": value for each, value in _top(table, top)}


def _top(table: np.ndarray, count: int) -> list[tuple[int, float]]:
    return [(int(token), float(table[token])) for token in np.argsort(-table)[:count]]
