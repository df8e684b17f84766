"""A server under test: what it serves, which request fields it takes, and how it counts tokens."""

import asyncio
import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from stoker.bench.record import ServerFacts
from stoker.bench.tokens import Counter, Refused, find_counter
from stoker.bench.wire import Clock, Exchange, open_connections, open_session, timed_post
from stoker.errors import BenchError

TIMEOUT = 300.0
# Optional request fields. Strict servers refuse fields they do not know, so the first set that works is kept.
# The third is for OpenAI's reasoning models: no temperature, and another name for max_tokens.
EVERYTHING: dict[str, Any] = {
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "return_token_ids": True,
}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
PLAIN_OPENAI: dict[str, Any] = dict(USAGE)
NOTHING: dict[str, Any] = {}
FIELD_SETS = (EVERYTHING, USAGE, PLAIN_OPENAI, NOTHING)


class Target:
    """Use as an async context manager; entering it finds out what the server is."""

    def __init__(
        self,
        url: str,
        model: str = "",
        api_key: str = "",
        extra: dict[str, Any] | None = None,
        name: str = "A",
        tokenizer: Path | None = None,
        context: int | None = None,
        timeout: float = TIMEOUT,
        clock: Clock = time.monotonic,
    ) -> None:
        at = urlsplit(url if "//" in url else f"http://{url}")
        if at.scheme not in ("http", "https") or not at.hostname:
            raise BenchError(f"{url!r} is no address of a server; write it like http://localhost:8000")
        self.url = f"{at.scheme}://{at.netloc}{at.path.rstrip('/').removesuffix('/v1')}"
        self.name, self.model, self.context = name, model, context
        self.engine = ""
        self.clock, self.timeout = clock, timeout
        self.counter = Counter()
        self.has_metrics = False
        self.speculation = "none seen"
        self._extra, self._tokenizer = extra or {}, tokenizer
        self._fields = EVERYTHING
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Target":
        self._session = open_session(self.clock, self._headers, self.timeout)
        try:
            await self._discover()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def body(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The request as it is sent: streaming, with every field for token counts that this server takes."""
        body = {"model": self.model, "temperature": 0, **asked, "stream": True, **self._fields, **self._extra}
        if self._fields is PLAIN_OPENAI:
            body["max_completion_tokens"] = body.pop("max_tokens", None)
            del body["temperature"]
        return body

    async def ask(self, asked: dict[str, Any]) -> Exchange:
        """A timed, streamed request. Never raises for what the server does; the exchange says what went wrong."""
        assert self._session is not None
        url = f"{self.url}/v1/completions" if "prompt" in asked else f"{self.url}/v1/chat/completions"
        body = json.dumps(self.body(asked)).encode()
        return await timed_post(self._session, url, body, self.clock, self.timeout)

    async def open(self, connections: int) -> None:
        """As many connections as will be used at once, before the first request is timed."""
        assert self._session is not None
        try:
            await open_connections(self._session, f"{self.url}/v1/models", connections)
        except (aiohttp.ClientError, OSError) as error:
            raise BenchError(f"cannot open {connections} connections to {self.url}: {error}") from error

    async def prompt_tokens(self, asked: dict[str, Any]) -> int:
        """From the usage of a request for one token."""
        path = "/v1/completions" if "prompt" in asked else "/v1/chat/completions"
        found = await self.post(path, {"model": self.model, **asked, **self._extra, "max_tokens": 1})
        tokens = (found.get("usage") or {}).get("prompt_tokens")
        if not isinstance(tokens, int):
            raise BenchError(
                f"{self.url} has no /tokenize and its answers carry no usage, so prompts cannot be fitted to a length; "
                "give its tokenizer with --tokenizer DIRECTORY"
            )
        return tokens

    async def scrape(self) -> dict[str, float]:
        if not self.has_metrics:
            return {}
        try:
            return counters(await self._get_text("/metrics"))
        except BenchError:
            return {}

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """An untimed call. Raises Refused, with the server's words, if the status is not 200."""
        assert self._session is not None
        try:
            async with self._session.post(self.url + path, json=body) as response:
                text = await response.text()
                if response.status != 200:
                    raise Refused(f"{self.url}{path} answered {response.status}: {text[:500]}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise BenchError(f"{self.url}{path}: {error or type(error).__name__}") from error
        return _object(text, self.url + path)

    def facts(self) -> ServerFacts:
        how = self.counter.how
        return ServerFacts(self.name, self.url, self.model, self.engine, self.context, how, self.speculation)

    async def _wait_until_ready(self) -> None:
        """A server that is still loading says so at /ready or /health; others have neither, or answer at once."""
        assert self._session is not None
        deadline = time.monotonic() + self.timeout
        for path in ("/ready", "/health"):
            while time.monotonic() < deadline:
                try:
                    async with self._session.get(self.url + path) as response:
                        if response.status != 503:
                            break
                except (aiohttp.ClientError, TimeoutError, OSError):
                    return  # `_discover` has the better message
                await asyncio.sleep(0.5)

    async def _discover(self) -> None:
        await self._wait_until_ready()
        try:
            listed = _object(await self._get_text("/v1/models"), f"{self.url}/v1/models").get("data") or []
        except BenchError as error:
            if not self.model:
                raise BenchError(
                    f"{error}. Is a server running there? Without /v1/models, say --model NAME."
                ) from error
            listed = []
        served = [str(model.get("id")) for model in listed]
        if not self.model:
            if not served:
                raise BenchError(f"{self.url}/v1/models lists no model; say which with --model NAME")
            self.model = served[0]
        elif served and self.model not in served:
            raise BenchError(f"{self.url} serves {', '.join(served)}, not {self.model}; choose one with --model")
        facts: dict[str, Any] = next((model for model in listed if model.get("id") == self.model), {})
        meta = facts.get("meta") or {}
        if self.context is None:
            found = (
                facts.get("max_model_len")
                or facts.get("context_length")
                or meta.get("n_ctx")
                or meta.get("n_ctx_train")
            )
            self.context = found if isinstance(found, int) else None
        self.engine = await self._engine(str(facts.get("owned_by") or ""))
        try:
            self.has_metrics = bool(counters(await self._get_text("/metrics")))
        except BenchError:
            self.has_metrics = False
        self._fields = await self._accepted_fields()
        self.counter = await find_counter(self, self._tokenizer)

    async def _accepted_fields(self) -> dict[str, Any]:
        """Tries requests for one token until the server takes one. A server that takes none is asked for everything."""
        assert self._session is not None
        for fields in FIELD_SETS:
            self._fields = fields
            body = self.body({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1})
            try:
                async with self._session.post(f"{self.url}/v1/chat/completions", json=body) as response:
                    await response.read()
                    if response.status not in (400, 422):
                        return fields
            except (aiohttp.ClientError, TimeoutError, OSError):
                break
        return EVERYTHING

    async def _engine(self, owner: str) -> str:
        try:
            version = _object(await self._get_text("/version"), "").get("version")
        except BenchError:
            return owner or "not told"
        return f"{owner or 'version'} {version}" if version else owner or "not told"

    async def _get_text(self, path: str) -> str:
        assert self._session is not None
        try:
            async with self._session.get(self.url + path, timeout=aiohttp.ClientTimeout(total=30)) as response:
                text = await response.text()
                if response.status != 200:
                    raise BenchError(f"{self.url}{path} answered {response.status}: {text[:300]}")
                return text
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise BenchError(f"{self.url}{path}: {error or type(error).__name__}") from error


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BenchError(f"{where} answered something that is no JSON: {text[:200]}") from error
    if not isinstance(found, dict):
        raise BenchError(f"{where} answered a JSON value that is no object: {text[:200]}")
    return found


def counters(page: str) -> dict[str, float]:
    """A Prometheus page: counters by name, summed over labels."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        if not line or line.startswith("#"):
            continue
        head, _, value = line.rpartition(" ")
        name = head.partition("{")[0].strip().rpartition(":")[2]  # vllm:, sglang:, stoker: alike
        try:
            found[name] = found.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return found
