"""Anthropic's POST /v1/messages and /v1/messages/count_tokens."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from stoker.engine.event import Finish, Stats
from stoker.server.endpoints.body import BodyRoute
from stoker.server.endpoints.usage import response_metrics
from stoker.server.generation import Delta
from stoker.server.lifecycle.service import Service, Submission
from stoker.server.output.blocks import Added, Block, Blocks, Change, Closed, Opened
from stoker.server.prepare.anthropic import chat_request, generating_request
from stoker.server.prepare.chat import chat_requests
from stoker.server.prepare.template import template_messages, template_tools
from stoker.server.schemas.messages import CountTokensRequest, MessagesRequest
from stoker.server.stream import event, respond

router = APIRouter(route_class=BodyRoute)
SIGNATURE = "stoker"  # thoughts that clients send back are not verified, so there is nothing to sign


@router.post("/v1/messages")
async def messages(body: MessagesRequest, request: Request) -> Response:
    service: Service = request.app.state.service
    arrived_at = time.perf_counter()
    service.model.check_name(body.model)
    service.admit()
    requests = await asyncio.to_thread(lambda: chat_requests(service, generating_request(body)))
    submission = service.submit(requests, arrived_at)
    response = MessagesResponse(service, submission)
    return await respond(request, submission, response, body.stream, lambda error: event("error", error.anthropic()))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, request: Request) -> dict[str, int]:
    service: Service = request.app.state.service
    service.model.check_name(body.model)

    def count() -> int:
        chat = chat_request(body)
        rendered = template_messages(chat.messages, service.config.max_messages)
        tools, going_on = template_tools(chat.tools), bool(chat.continue_final_message)
        return len(service.model.render(rendered, tools, True, chat.template_options, going_on))

    return {"input_tokens": await asyncio.to_thread(count)}


class MessagesResponse:
    def __init__(self, service: Service, submission: Submission) -> None:
        self._service = service
        (self._generation,) = submission.generations
        self._head = {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": service.model.name,
        }

    async def whole(self) -> dict[str, Any]:
        blocks = Blocks()
        async for delta in self._generation.deltas():
            for piece in delta.pieces:
                for _ in blocks.push(piece):
                    pass
        return {
            **self._head,
            "content": [_whole(block) for block in blocks.all],
            **_ending(delta, blocks),
            "usage": _usage(delta.stats or Stats()),
            "metrics": response_metrics([delta.stats or Stats()], self._service.choice.depth),
        }

    async def stream(self) -> AsyncIterator[str]:
        blocks = Blocks()
        nothing: dict[str, Any] = {"input_tokens": len(self._generation.request.prompt), "output_tokens": 0}
        start: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": nothing,
        }
        yield event("message_start", {"type": "message_start", "message": start})
        async for delta in self._generation.deltas():
            changes = [change for piece in delta.pieces for change in blocks.push(piece)]
            if delta.finish:
                changes += blocks.finish()
            if changes:
                yield "".join(_event(change) for change in changes)
        stats = delta.stats or Stats()
        end = {
            "type": "message_delta",
            "delta": _ending(delta, blocks),
            "usage": _usage(stats),
            "metrics": response_metrics([stats], self._service.choice.depth),
        }
        yield event("message_delta", end) + event("message_stop", {"type": "message_stop"})


def _event(change: Change) -> str:
    index = change.block.index
    match change:
        case Opened():
            message = {"type": "content_block_start", "index": index, "content_block": _start(change.block)}
            return event("content_block_start", message)
        case Added():
            return _delta(index, _added(change.block, change.text))
        case Closed():
            signed = change.block.kind == "reasoning"
            signature = _delta(index, {"type": "signature_delta", "signature": SIGNATURE}) if signed else ""
            return signature + event("content_block_stop", {"type": "content_block_stop", "index": index})


def _delta(index: int, delta: dict[str, Any]) -> str:
    return event("content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta})


def _start(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": {}}


def _added(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    if block.kind == "text":
        return {"type": "text_delta", "text": text}
    return {"type": "input_json_delta", "partial_json": text}


def _whole(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    try:
        arguments = json.loads(block.text or "{}")
    except (ValueError, RecursionError):  # cut off by max_tokens, as the stop reason says
        arguments = {"partial_json": block.text}
    return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": arguments}


def _ending(delta: Delta, blocks: Blocks) -> dict[str, Any]:
    if delta.finish is Finish.LENGTH:
        reason = "max_tokens"
    elif delta.stop is not None:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if blocks.calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": delta.stop}


def _usage(stats: Stats) -> dict[str, int]:
    """Anthropic counts cached input tokens separately from the others."""
    return {
        "input_tokens": stats.prompt_tokens - stats.cached_tokens,
        "cache_read_input_tokens": stats.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": stats.output_tokens,
    }
