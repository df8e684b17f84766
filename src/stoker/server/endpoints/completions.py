"""POST /v1/completions: continues text without a chat template."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from stoker.engine.event import Finish, Stats, TokenLogprob
from stoker.server.endpoints.body import BodyRoute
from stoker.server.endpoints.chat import drafts_of, finish_reason
from stoker.server.endpoints.logprobs import completion_logprobs, echoed_logprobs, prompt_logprobs
from stoker.server.endpoints.usage import response_metrics, usage
from stoker.server.errors import ApiError
from stoker.server.generation import Delta, EngineRequest, merged
from stoker.server.lifecycle.service import Service, Submission
from stoker.server.output.pieces import Content
from stoker.server.prepare.chat import MOST_LOGPROBS, engine_request
from stoker.server.prepare.sampling import choice_count, choice_samplings
from stoker.server.prepare.structured import answer_mask
from stoker.server.schemas.completions import CompletionRequest
from stoker.server.stream import DONE, data, respond

router = APIRouter(route_class=BodyRoute)
DEFAULT_TOKENS = 16  # OpenAI's
MOST_PROMPTS = 64


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    service: Service = request.app.state.service
    arrived_at = time.perf_counter()
    service.model.check_name(body.model)
    service.admit()
    submission = service.submit(await asyncio.to_thread(completion_requests, service, body), arrived_at)
    response = CompletionResponse(service, body, submission)
    return await respond(request, submission, response, body.stream, lambda error: data(error.openai()), DONE)


def completion_requests(service: Service, body: CompletionRequest) -> list[EngineRequest]:
    """One engine request per prompt and choice."""
    if body.suffix:
        raise ApiError(400, "suffix is not supported: text is only continued.", param="suffix")
    if body.logprobs is not None and not 0 <= body.logprobs <= MOST_LOGPROBS:
        raise ApiError(400, f"logprobs is {body.logprobs}, expected 0 to {MOST_LOGPROBS}.", param="logprobs")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens is 0, expected at least 1; 0 only with echo.", param="max_tokens")
    wanted = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens or 1  # one token is computed for 0
    mask = answer_mask(service.model, body.response_format, body.structured_outputs, thinking=False)
    requests = []
    for prompt in _prompts(service, body):
        echoed = body.logprobs if body.echo else None
        request = replace(engine_request(service, body, prompt, wanted, body.logprobs, echoed), parsed=False, mask=mask)
        samplings = choice_samplings(request.sampling, choice_count(body))
        requests += [replace(request, sampling=each) for each in samplings]
    return requests


def _prompts(service: Service, body: CompletionRequest) -> list[list[int]]:
    given = body.prompt
    if isinstance(given, str):
        return [service.model.encode(given)]
    if given and all(isinstance(entry, int) for entry in given):
        return [[entry for entry in given if isinstance(entry, int)]]
    if not given or len(given) > MOST_PROMPTS:
        raise ApiError(400, f"prompt has {len(given)} entries, expected 1 to {MOST_PROMPTS}.", param="prompt")
    return [service.model.encode(entry) if isinstance(entry, str) else list(entry) for entry in given]  # type: ignore[arg-type]


class CompletionResponse:
    def __init__(self, service: Service, body: CompletionRequest, submission: Submission) -> None:
        self._service, self._body, self._submission, self._requests = service, body, submission, submission.requests
        self._model = service.model
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model.name,
        }

    async def whole(self) -> dict[str, Any]:
        deltas: list[list[Delta]] = [[] for _ in self._requests]
        async for index, delta in self._deltas():
            deltas[index].append(delta)
        stats = [found[-1].stats or Stats() for found in deltas]
        return {
            **self._head,
            "choices": await asyncio.to_thread(lambda: [self._choice(*each) for each in enumerate(deltas)]),
            "usage": self._usage(stats),
            "metrics": response_metrics(stats, self._service.choice.depth),
        }

    def _choice(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        echo = self._echo(index)
        found: dict[str, Any] = {
            "index": index,
            "text": echo + "".join(map(text_of, deltas)),
            "logprobs": None,
            "finish_reason": finish_reason(deltas[-1].finish, called=False),
            "stop_reason": deltas[-1].stop,
        }
        if self._body.logprobs is not None:
            logprobs = [each for delta in deltas for each in delta.logprobs]
            found["logprobs"] = self._logprobs(index, logprobs, deltas[0], len(echo))
        if self._body.prompt_logprobs is not None:
            scored = deltas[0].prompt_logprobs
            found["prompt_logprobs"] = prompt_logprobs(scored, self._model, self._body.prompt_logprobs)
        if self._body.return_token_ids:
            found["prompt_token_ids"] = self._requests[index].prompt
            found["token_ids"] = [token for delta in deltas for token in delta.tokens]
        return found

    async def stream(self) -> AsyncIterator[str]:
        options = self._body.stream_options
        with_usage, counting = bool(options and options.include_usage), bool(options and options.continuous_usage_stats)
        ended: dict[int, Stats] = {}
        tokens, began = 0, [False] * len(self._requests)
        offsets = [len(self._echo(index)) for index in range(len(self._requests))]
        prompt = len(self._requests[0].prompt)
        async for index, delta in self._deltas():
            tokens += len(delta.tokens)
            text = ("" if began[index] else self._echo(index)) + text_of(delta)
            if delta.finish:
                ended[index] = delta.stats or Stats()
            elif not text and self._body.logprobs is None and not self._body.return_token_ids:
                continue
            entry = self._chunk_choice(index, text, delta, offsets, began[index])
            began[index] = True
            chunk: dict[str, Any] = {**self._head, "choices": [entry]}
            if counting:
                chunk["usage"] = usage(prompt, tokens)
            elif with_usage:
                chunk["usage"] = None
            if len(ended) == len(self._requests) and not with_usage:
                chunk["metrics"] = response_metrics(list(ended.values()), self._service.choice.depth)
            yield data(chunk)
        if with_usage:
            stats = [ended[index] for index in sorted(ended)]
            metrics = response_metrics(stats, self._service.choice.depth)
            yield data({**self._head, "choices": [], "usage": self._usage(stats), "metrics": metrics})

    def _chunk_choice(self, index: int, text: str, delta: Delta, offsets: list[int], began: bool) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_reason(delta.finish, called=False) if delta.finish else None,
        }
        if delta.finish:
            found["stop_reason"] = delta.stop
        if self._body.logprobs is not None:
            found["logprobs"] = self._logprobs(index, delta.logprobs, None if began else delta, offsets[index])
            offsets[index] += sum(len(self._model.token_text(each.token)) for each in delta.logprobs)
        if self._body.return_token_ids:
            found["token_ids"] = list(delta.tokens)
            if not began:
                found["prompt_token_ids"] = self._requests[index].prompt
        if self._body.return_drafts and delta.tokens:
            found["drafts"] = drafts_of(delta, self._model)
        return found

    def _usage(self, stats: list[Stats]) -> dict[str, Any]:
        """Token counts, with each prompt counted once however many choices it has."""
        firsts = stats[:: choice_count(self._body)]
        return usage(
            sum(each.prompt_tokens for each in firsts),
            0 if self._prompt_only else sum(each.output_tokens for each in stats),
            sum(each.cached_tokens for each in firsts),
        )

    @property
    def _prompt_only(self) -> bool:
        return self._body.max_tokens == 0

    async def _deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """The deltas. With max_tokens 0 the single token that the engine computes is left out."""
        async for index, delta in merged(self._submission.generations):
            if self._prompt_only:
                delta = delta._replace(pieces=[], tokens=(), logprobs=(), finish=Finish.LENGTH, stop=None)
            yield index, delta

    def _logprobs(self, index: int, made: Sequence[TokenLogprob], first: Delta | None, offset: int) -> dict[str, Any]:
        """Log-probabilities of tokens that begin at `offset`; with `first`, after those of an echoed prompt."""
        found = completion_logprobs(made, self._model, offset)
        if not self._body.echo or first is None:
            return found
        top = self._body.logprobs or 0
        before = echoed_logprobs(self._requests[index].prompt, first.prompt_logprobs, self._model, top)
        return {name: before[name] + found[name] for name in found}

    def _echo(self, index: int) -> str:
        return self._model.decode(self._requests[index].prompt) if self._body.echo else ""


def text_of(delta: Delta) -> str:
    return "".join(piece.text for piece in delta.pieces if isinstance(piece, Content))
