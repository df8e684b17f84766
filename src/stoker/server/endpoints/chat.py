"""POST /v1/chat/completions."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from stoker.engine.event import Finish, Stats
from stoker.server.endpoints.body import BodyRoute
from stoker.server.endpoints.logprobs import chat_logprobs, prompt_logprobs
from stoker.server.endpoints.usage import final_usage, response_metrics, usage
from stoker.server.generation import Delta, merged
from stoker.server.lifecycle.service import Service, Submission
from stoker.server.output.pieces import Call, CallArguments, CallStart, Content, Message, Piece, Reasoning
from stoker.server.prepare.chat import chat_requests
from stoker.server.schemas.chat import ChatRequest
from stoker.server.stream import DONE, data, respond

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    service: Service = request.app.state.service
    arrived_at = time.perf_counter()
    service.model.check_name(body.model)
    service.admit()
    submission = service.submit(await asyncio.to_thread(chat_requests, service, body), arrived_at)
    response = ChatResponse(service, body, submission)
    return await respond(request, submission, response, body.stream, lambda error: data(error.openai()), DONE)


@dataclass
class Choice:
    """What has been sent of one choice."""

    began: bool = False
    calls: int = 0
    reasoning_tokens: int = 0
    tokens: int = 0
    call: tuple[str, str] = ("function", "arguments")  # type of the current call, and the field of its text


class ChatResponse:
    """One response, sent as a whole or as a stream."""

    def __init__(self, service: Service, body: ChatRequest, submission: Submission) -> None:
        self._service, self._body, self._submission, self._requests = service, body, submission, submission.requests
        self._model = service.model
        self._custom = body.custom_tools
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self._model.name}

    async def whole(self) -> dict[str, Any]:
        messages = [Message() for _ in self._requests]
        deltas: list[list[Delta]] = [[] for _ in self._requests]
        thinking = 0
        async for index, delta in merged(self._submission.generations):
            deltas[index].append(delta)
            thinking += delta.reasoning_tokens
            for piece in self._visible_pieces(delta):
                messages[index].add(piece)
        stats = [each.stats or Stats() for each in (found[-1] for found in deltas)]
        found = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, message, deltas[index]) for index, message in enumerate(messages)],
            "usage": final_usage(stats, thinking),
            "metrics": response_metrics(stats, self._service.choice.depth),
            "system_fingerprint": None,
        }
        if self._body.return_token_ids:
            found["prompt_token_ids"] = self._requests[0].prompt
        if (top := self._body.prompt_logprobs) is not None:
            scored = deltas[0][0].prompt_logprobs
            found["prompt_logprobs"] = await asyncio.to_thread(prompt_logprobs, scored, self._model, top)
        return found

    def _choice(self, index: int, message: Message, deltas: list[Delta]) -> dict[str, Any]:
        calls = message.calls
        answer: dict[str, Any] = {
            "role": "assistant",
            "content": message.content if message.content or not calls else None,
            "refusal": None,
        }
        if message.reasoning:
            answer["reasoning_content"] = message.reasoning
        if calls:
            answer["tool_calls"] = [self._call(call) for call in calls]
        found: dict[str, Any] = {
            "index": index,
            "message": answer,
            "logprobs": None,
            "finish_reason": finish_reason(deltas[-1].finish, bool(calls)),
            "stop_reason": deltas[-1].stop,
        }
        if self._body.logprobs:
            found["logprobs"] = chat_logprobs((each for delta in deltas for each in delta.logprobs), self._model)
        if self._body.return_token_ids:
            found["token_ids"] = [token for delta in deltas for token in delta.tokens]
        return found

    def _call(self, call: Call) -> dict[str, Any]:
        if call.name in self._custom:
            return {"id": call_id(), "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
        return {"id": call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _visible_pieces(self, delta: Delta) -> list[Piece]:
        if self._body.include_reasoning is not False:
            return delta.pieces
        return [piece for piece in delta.pieces if not isinstance(piece, Reasoning)]

    async def stream(self) -> AsyncIterator[str]:
        options = self._body.stream_options
        with_usage, counting = bool(options and options.include_usage), bool(options and options.continuous_usage_stats)
        choices = [Choice() for _ in self._requests]
        ended: dict[int, Stats] = {}
        prompt = len(self._requests[0].prompt)
        async for index, delta in merged(self._submission.generations):
            choice = choices[index]
            choice.tokens += len(delta.tokens)
            choice.reasoning_tokens += delta.reasoning_tokens
            entry = self._chunk_choice(index, choice, delta)
            if delta.finish:
                ended[index] = delta.stats or Stats()
            if entry is None:
                continue
            chunk = {**self._head, "object": "chat.completion.chunk", "choices": [entry]}
            if self._body.return_token_ids and not choice.began:
                chunk["prompt_token_ids"] = self._requests[index].prompt
            choice.began = True
            if counting:
                chunk["usage"] = usage(prompt, sum(each.tokens for each in choices))
            elif with_usage:
                chunk["usage"] = None
            if len(ended) == len(choices) and not with_usage:
                chunk["metrics"] = self._metrics(ended)
            yield data(chunk)
        if with_usage:
            stats = [ended[index] for index in sorted(ended)]
            yield data(
                {
                    **self._head,
                    "object": "chat.completion.chunk",
                    "choices": [],
                    "usage": final_usage(stats, sum(each.reasoning_tokens for each in choices)),
                    "metrics": self._metrics(ended),
                }
            )

    def _metrics(self, ended: dict[int, Stats]) -> dict[str, Any]:
        return response_metrics(list(ended.values()), self._service.choice.depth)

    def _chunk_choice(self, index: int, choice: Choice, delta: Delta) -> dict[str, Any] | None:
        """The choice of one chunk, or None if the step added nothing visible: a possible tag is held back."""
        body = self._body
        extras = body.logprobs or body.return_token_ids or (body.return_drafts and delta.drafts)
        pieces = self._visible_pieces(delta)
        if not pieces and not delta.finish and not extras:
            return None
        answer = message_delta(pieces, choice, self._custom)
        if not choice.began:
            answer = {"role": "assistant", **answer}
        entry: dict[str, Any] = {
            "index": index,
            "delta": answer,
            "finish_reason": finish_reason(delta.finish, choice.calls > 0) if delta.finish else None,
        }
        if delta.finish:
            entry["stop_reason"] = delta.stop
        if body.logprobs:
            entry["logprobs"] = chat_logprobs(delta.logprobs, self._model)
        if body.return_token_ids:
            entry["token_ids"] = list(delta.tokens)
        if body.return_drafts and delta.tokens:
            entry["drafts"] = drafts_of(delta, self._model)
        return entry


def message_delta(pieces: list[Piece], choice: Choice, custom: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The pieces of a step as one message delta. `custom` are the names of custom tools, which take plain text."""
    found: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        match piece:
            case Content():
                found["content"] = found.get("content", "") + piece.text
            case Reasoning():
                found["reasoning_content"] = found.get("reasoning_content", "") + piece.text
            case CallStart():
                choice.calls += 1
                choice.call = ("custom", "input") if piece.name in custom else ("function", "arguments")
                kind, field = choice.call
                called = {"type": kind, kind: {"name": piece.name, field: ""}}
                calls.append({"index": piece.index, "id": call_id(), **called})
            case CallArguments():
                kind, field = choice.call
                if calls and calls[-1]["index"] == piece.index:
                    calls[-1][kind][field] += piece.text
                else:
                    calls.append({"index": piece.index, kind: {field: piece.text}})
    if calls:
        found["tool_calls"] = calls
    return found


def drafts_of(delta: Delta, model: Any) -> dict[str, Any]:
    """The drafts of a step, for clients that ask for them with return_drafts."""
    accepted = delta.accepted
    return {
        "accepted": accepted,
        "forced": delta.forced,
        "tokens": [model.token_text(token) for token in delta.tokens],
        "rejected": [model.token_text(token) for token in delta.drafts[accepted:]],
    }


def finish_reason(finish: Finish | None, called: bool) -> str:
    if finish is Finish.LENGTH:
        return "length"
    return "tool_calls" if called else "stop"


def call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
