"""OpenAI's POST /v1/responses. A request contains its whole conversation; items of past answers may be references."""

import asyncio
import json
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from stoker.engine.event import Finish, Stats, TokenLogprob
from stoker.server.endpoints.body import BodyRoute
from stoker.server.endpoints.logprobs import chat_logprobs
from stoker.server.endpoints.usage import response_metrics
from stoker.server.errors import ApiError
from stoker.server.generation import Delta
from stoker.server.lifecycle.service import Service, Submission
from stoker.server.output.blocks import Added, Block, Blocks, Change, Closed, Opened
from stoker.server.prepare.chat import chat_requests
from stoker.server.prepare.responses import chat_request
from stoker.server.prepare.responses_tools import namespaces
from stoker.server.schemas.responses import ResponsesRequest
from stoker.server.stream import event, respond

router = APIRouter(route_class=BodyRoute)
MOST_CHARACTERS = 64 * 1024 * 1024  # of all kept items; the oldest are evicted first


@router.post("/v1/responses")
async def responses(body: ResponsesRequest, request: Request) -> Response:
    service: Service = request.app.state.service
    arrived_at = time.perf_counter()
    service.model.check_name(body.model)
    service.admit()
    items: KeptItems = request.app.state.kept_items
    chat = await asyncio.to_thread(chat_request, body, items.find)
    submission = service.submit(await asyncio.to_thread(chat_requests, service, chat), arrived_at)
    response = ResponsesResponse(service, items, body, submission)
    return await respond(request, submission, response, body.stream, response.failed)


class ResponsesResponse:
    def __init__(
        self,
        service: Service,
        items: "KeptItems",
        body: ResponsesRequest,
        submission: Submission,
    ) -> None:
        self._service, self._items, self._body = service, items, body
        (self._generation,) = submission.generations
        sampling = self._generation.request.sampling
        self._blocks = Blocks()
        self._custom = self._generation.request.custom
        self._namespaces = namespaces(body.tools)
        self._events = 0
        self._logprobs: list[TokenLogprob] = []
        self._thinking = 0  # reasoning tokens so far
        self._head: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": service.model.name,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_output_tokens": body.max_output_tokens,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "text": body.text or {"format": {"type": "text"}},
            "reasoning": body.reasoning,
            "previous_response_id": None,
            "truncation": "disabled",
            "store": False,
            "background": False,
            "error": None,
            "incomplete_details": None,
        }

    async def whole(self) -> dict[str, Any]:
        async for delta in self._generation.deltas():
            for _ in self._changes(delta):
                pass
        return self._response(delta)

    async def stream(self) -> AsyncIterator[str]:
        opening = {**self._head, "status": "in_progress", "output": [], "usage": None}
        yield self._event("response.created", response=opening) + self._event("response.in_progress", response=opening)
        async for delta in self._generation.deltas():
            text = "".join(part for change in self._changes(delta) for part in self._events_of(change, delta))
            if text:
                yield text
        ended = self._response(delta)
        yield self._event(f"response.{ended['status']}", response=ended)

    def failed(self, error: ApiError) -> str:
        error_body = {"code": "server_error", "message": error.message}
        ended = {**self._head, "status": "failed", "output": [], "usage": None, "error": error_body}
        return self._event("error", code="server_error", message=error.message, param=None) + self._event(
            "response.failed", response=ended
        )

    def _changes(self, delta: Delta) -> Iterator[Change]:
        self._logprobs += delta.logprobs
        self._thinking += delta.reasoning_tokens
        for piece in delta.pieces:
            yield from self._keep_closed(self._blocks.push(piece))
        if delta.finish:
            yield from self._keep_closed(self._blocks.finish())

    def _keep_closed(self, changes: Iterator[Change]) -> Iterator[Change]:
        for change in changes:
            if isinstance(change, Closed) and self._body.store is not False:
                self._items.keep(self._item(change.block, "completed"))
            yield change

    def _response(self, delta: Delta) -> dict[str, Any]:
        cut = delta.finish is Finish.LENGTH
        stats = delta.stats or Stats()
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item(block, "incomplete" if cut else "completed") for block in self._blocks.all],
            "usage": {
                "input_tokens": stats.prompt_tokens,
                "input_tokens_details": {"cached_tokens": stats.cached_tokens},
                "output_tokens": stats.output_tokens,
                "output_tokens_details": {"reasoning_tokens": self._thinking},
                "total_tokens": stats.prompt_tokens + stats.output_tokens,
            },
            "metrics": response_metrics([stats], self._service.choice.depth),
        }

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        if block.kind == "reasoning":
            parts = [{"type": "reasoning_text", "text": block.text}] if block.text else []
            return {"id": f"rs_{block.id}", "type": "reasoning", "summary": [], "content": parts, "status": status}
        if block.kind == "call":
            return self._call_item(block, status)
        parts = [self._text_part(block.text)] if block.text else []
        return {"id": f"msg_{block.id}", "type": "message", "role": "assistant", "content": parts, "status": status}

    def _call_item(self, block: Block, status: str) -> dict[str, Any]:
        namespace, name = self._namespaces.get(block.name, (None, block.name))
        named = {"call_id": f"call_{block.id}", "name": name, **({"namespace": namespace} if namespace else {})}
        if block.name in self._custom:
            call = {"id": f"ctc_{block.id}", "type": "custom_tool_call", "input": block.text}
        else:
            call = {"id": f"fc_{block.id}", "type": "function_call", "arguments": block.text}
        return {**call, **named, "status": status}

    def _text_part(self, text: str) -> dict[str, Any]:
        found = chat_logprobs(self._logprobs, self._service.model)["content"] if self._body.wants_logprobs else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": found}

    def _events_of(self, change: Change, delta: Delta) -> Iterator[str]:
        block = change.block
        ids = {"item_id": self._item(block, "in_progress")["id"], "output_index": block.index}
        part = {**ids, "content_index": 0}
        match change, block.kind:
            case Opened(), kind:
                empty = Block(block.index, block.kind, block.name, "", block.id)
                yield self._event(
                    "response.output_item.added", output_index=block.index, item=self._item(empty, "in_progress")
                )
                if kind == "text":
                    yield self._event("response.content_part.added", **part, part=self._text_part(""))
            case Added(text=text), "text":
                found = chat_logprobs(delta.logprobs, self._service.model)["content"] if delta.logprobs else []
                yield self._event("response.output_text.delta", **part, delta=text, logprobs=found)
            case Added(text=text), "reasoning":
                yield self._event("response.reasoning_text.delta", **part, delta=text)
            case Added(text=text), "call" if block.name in self._custom:
                yield self._event("response.custom_tool_call_input.delta", **ids, delta=text)
            case Added(text=text), "call":
                yield self._event("response.function_call_arguments.delta", **ids, delta=text)
            case Closed(), kind:
                if kind == "text":
                    whole = self._text_part(block.text)
                    yield self._event("response.output_text.done", **part, text=block.text, logprobs=whole["logprobs"])
                    yield self._event("response.content_part.done", **part, part=whole)
                elif kind == "reasoning":
                    yield self._event("response.reasoning_text.done", **part, text=block.text)
                elif block.name in self._custom:
                    yield self._event("response.custom_tool_call_input.done", **ids, input=block.text)
                else:
                    yield self._event(
                        "response.function_call_arguments.done", **ids, name=block.name, arguments=block.text
                    )
                item = self._item(block, "completed")
                yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, /, **fields: Any) -> str:
        message = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return event(kind, message)


class KeptItems:
    """Items of past answers by id, in memory only. Thread-safe, since each operation is a single dict operation."""

    def __init__(self, most: int = MOST_CHARACTERS) -> None:
        self._most, self._size = most, 0
        self._items: OrderedDict[str, str] = OrderedDict()

    def keep(self, item: dict[str, Any]) -> None:
        text = json.dumps(item)
        self._items[item["id"]] = text
        self._size += len(text)
        while self._size > self._most:
            _, oldest = self._items.popitem(last=False)
            self._size -= len(oldest)

    def find(self, item_id: str) -> dict[str, Any] | None:
        text = self._items.get(item_id)
        found: dict[str, Any] | None = None if text is None else json.loads(text)
        return found
