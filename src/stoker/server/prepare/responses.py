"""A request of OpenAI's /v1/responses as a chat request: its items become messages, its tools functions."""

import json
from collections.abc import Callable
from typing import Any

from stoker.server.errors import ApiError
from stoker.server.output.custom import CUSTOM_INPUT
from stoker.server.prepare.responses_tools import flat_name, function_tools, translated_choice
from stoker.server.prepare.template import newest_message, text_of
from stoker.server.schemas.chat import ChatMessage, ChatRequest, FunctionCall, ToolCall
from stoker.server.schemas.common import Json, JsonSchemaFormat, ResponseFormat, SamplingBody
from stoker.server.schemas.responses import ResponsesRequest

ROLES = ("user", "assistant", "system", "developer")
STATEFUL = {
    "previous_response_id": "responses are not kept; send the whole conversation as input",
    "conversation": "conversations are not kept; send the whole conversation as input",
    "background": "a response is made while its client waits",
    "prompt": "prompt templates are not kept",
}
# records of what OpenAI's servers did, which say nothing that the model could read
LEFT_OUT = ("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "compaction", "additional_tools")


def chat_request(body: ResponsesRequest, kept: Callable[[str], Json | None]) -> ChatRequest:
    """`kept` finds items of past answers by their id."""
    for name, reason in STATEFUL.items():
        if getattr(body, name):
            raise ApiError(400, f"{name} is not supported: {reason}.", param=name)
    if body.n not in (None, 1):
        raise ApiError(400, f"n is {body.n}; /v1/responses gives one answer.", param="n")
    omitted: list[str] = []
    chat = ChatRequest(
        **{name: getattr(body, name) for name in SamplingBody.model_fields},
        messages=_messages(body, kept, omitted),
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.wants_logprobs or None,
        top_logprobs=body.top_logprobs if body.wants_logprobs else None,
        tools=function_tools(body.tools, omitted),
        tool_choice=translated_choice(body.tool_choice, body.tools, omitted),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text),
        reasoning_effort=_effort(body),
        thinking_token_budget=body.thinking_token_budget,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    chat.omitted.extend(omitted)
    return chat


def _effort(body: ResponsesRequest) -> str | None:
    effort = (body.reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise ApiError(400, "reasoning.effort is a text, such as none, low or high.", param="reasoning.effort")
    return effort


def _messages(body: ResponsesRequest, kept: Callable[[str], Json | None], omitted: list[str]) -> list[ChatMessage]:
    found = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*found, ChatMessage(role="user", content=body.input)]
    newest = newest_message([str(item.get("role")) for item in body.input])
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        if item.get("type") == "item_reference" or item.keys() == {"id"}:
            item = _referred(item, kept, where)
        _add(found, item, where, index == newest, omitted)
    return found


def _referred(item: Json, kept: Callable[[str], Json | None], where: str) -> Json:
    name = str(item.get("id"))
    found = kept(name)
    if found is None:
        raise ApiError(
            404,
            f"Item with id {name[:100]!r} not found. Items of past answers are kept for a while, unless store is "
            "false; send the item itself.",
            param=where,
        )
    return found


def _add(found: list[ChatMessage], item: Json, where: str, last: bool, omitted: list[str]) -> None:
    """Adds an item to the messages. The items of one answer (a thought, a text, calls) become one message.

    A picture is refused in the last message only; `part_text` says what becomes of others.
    """
    kind = item.get("type", "message")
    if kind == "message":
        role, content = item.get("role"), item.get("content")
        if role not in ROLES or not isinstance(content, str | list):
            raise ApiError(400, f"{where}: a message has a role ({', '.join(ROLES)}) and content.", param=where)
        text = text_of(_parts(content, where), where, None if last else omitted)
        if role == "assistant" and found and found[-1].role == "assistant" and not found[-1].tool_calls:
            found[-1].content = str(found[-1].content or "") + text
        else:
            found.append(ChatMessage(role=role, content=text))
    elif kind == "function_call":
        name, arguments = item.get("name"), item.get("arguments", "{}")
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise ApiError(400, f"{where}: a function_call has a name and arguments, both texts.", param=where)
        _add_call(found, item, flat_name(item.get("namespace"), name), arguments)
    elif kind == "custom_tool_call":
        name, given = item.get("name"), item.get("input", "")
        if not isinstance(name, str) or not isinstance(given, str):
            raise ApiError(400, f"{where}: a custom_tool_call has a name and an input, both texts.", param=where)
        _add_call(found, item, flat_name(item.get("namespace"), name), json.dumps({CUSTOM_INPUT: given}))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output", "")
        text = output if isinstance(output, str) else text_of(_parts(output, where), where, omitted)
        found.append(ChatMessage(role="tool", content=text, tool_call_id=str(item.get("call_id", ""))))
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list):
            raise ApiError(400, f"{where}: a reasoning item has content or a summary, both lists.", param=where)
        thought = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
        if thought:
            found.append(ChatMessage(role="assistant", content="", reasoning_content=thought))
    elif kind in ("local_shell_call", "shell_call", "apply_patch_call"):  # the client ran them: the model may know
        did = item.get("action", item.get("operation", {}))
        _add_call(
            found, item, kind.removesuffix("_call"), json.dumps(did if isinstance(did, dict) else {"action": did})
        )
    elif kind in ("local_shell_call_output", "shell_call_output", "apply_patch_call_output"):
        output = item.get("output", "")
        text = output if isinstance(output, str) else json.dumps(output)
        found.append(ChatMessage(role="tool", content=text, tool_call_id=str(item.get("call_id", item.get("id", "")))))
    elif isinstance(kind, str) and (kind in LEFT_OUT or kind.endswith(("_call", "_output"))):
        omitted.append(f"item:{kind}")
    else:
        raise ApiError(
            400,
            f"{where} is of type {str(kind)[:50]!r}; this server knows messages, reasoning, calls and their outputs.",
            param=where,
        )


def _add_call(found: list[ChatMessage], item: Json, name: str, arguments: str) -> None:
    if not found or found[-1].role != "assistant":
        found.append(ChatMessage(role="assistant", content=""))
    call = ToolCall(id=str(item.get("call_id", "")), function=FunctionCall(name=name, arguments=arguments))
    found[-1].tool_calls = [*(found[-1].tool_calls or []), call]


def _parts(content: Any, where: str) -> str | list[Json]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ApiError(400, f"{where}: content is a text or a list of parts.", param=where)
    return content


def _format(text: Json | None) -> ResponseFormat | None:
    wanted = (text or {}).get("format")
    if not isinstance(wanted, dict):
        return None
    kind = wanted.get("type", "text")
    if kind not in ("text", "json_object", "json_schema"):
        raise ApiError(400, f"text.format is of type {str(kind)[:50]!r}, expected text, json_object or json_schema.")
    schema = wanted.get("schema")
    if kind != "json_schema":
        return ResponseFormat(type=kind)
    if not isinstance(schema, dict):
        raise ApiError(400, "text.format is json_schema, but it has no schema.", param="text.format")
    return ResponseFormat(type=kind, json_schema=JsonSchemaFormat.model_validate({"schema": schema}))
