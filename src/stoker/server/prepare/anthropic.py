"""A request of Anthropic's /v1/messages as a chat request: its conversation, tools, choice and settings.

Calls of tools that Anthropic's own servers would have run, and their results, are treated like any other call.
"""

import json
from typing import Any, Literal

from stoker.server.errors import ApiError
from stoker.server.prepare.anthropic_tools import function_tools
from stoker.server.prepare.template import newest_message, part_text
from stoker.server.schemas.chat import ChatMessage, ChatRequest, FunctionCall, NamedFunction, NamedTool, Tool, ToolCall
from stoker.server.schemas.common import Json, JsonSchemaFormat, ResponseFormat
from stoker.server.schemas.messages import CountTokensRequest, MessagesRequest, ToolChoice

BILLING = "x-anthropic-billing-header:"  # a block of Claude Code's, whose digits would keep prompts from being cached
CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
SILENT = ("redacted_thinking", "container_upload", "compaction", "fallback")  # nothing in them for a model to read


def generating_request(body: MessagesRequest) -> ChatRequest:
    """The whole request, with limits, sampling and output format."""
    choice, parallel = _choice(body.tool_choice)
    wanted = body.output_config.format if body.output_config else None
    schema = wanted and JsonSchemaFormat.model_validate({"schema": wanted.schema_})
    return chat_request(
        body,
        max_completion_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        stream=body.stream,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        thinking_token_budget=body.thinking and body.thinking.budget_tokens,
        response_format=schema and ResponseFormat(type="json_schema", json_schema=schema),
    )


def chat_request(body: CountTokensRequest, **settings: Any) -> ChatRequest:
    """The conversation and its tools. `settings` are further fields of the chat request."""
    if body.thread is not None:
        raise ApiError(
            400,
            "thread is not supported: messages are not kept. Send the whole conversation without thread.",
            anthropic_code="thread_unsupported_request",
        )
    omitted: list[str] = []
    messages = [ChatMessage(role="system", content=_system_text(body.system))] if body.system else []
    newest = newest_message([message.role for message in body.messages])
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        messages += _chat_messages(message.role, message.content, where, index == newest, omitted)
    tools = function_tools(body.tools, omitted)
    if "tool_choice" in settings:
        settings["tool_choice"] = _possible_choice(settings["tool_choice"], body, tools)
    options = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    chat = ChatRequest(
        model=body.model,
        messages=messages,
        tools=tools,
        chat_template_kwargs=options,
        continue_final_message=_begins_answer(body) or None,
        **settings,
    )
    chat.omitted.extend(omitted)
    return chat


def _choice(choice: ToolChoice | None) -> tuple[Any, bool | None]:
    """tool_choice and parallel_tool_calls as OpenAI spells them."""
    if choice is None:
        return None, None
    parallel = None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if not choice.name:
            raise ApiError(400, "tool_choice of type tool needs the name of a tool.", param="tool_choice")
        return NamedTool(function=NamedFunction(name=choice.name)), parallel
    return {"any": "required"}.get(choice.type, choice.type), parallel


def _possible_choice(choice: Any, body: CountTokensRequest, tools: list[Tool] | None) -> Any:
    """The choice, or a weaker one where it could only be met by a tool that was left out."""
    if len(tools or ()) == len(body.tools or ()):
        return choice
    if not tools:
        return None
    known, left = {tool.name for tool in body.tools or ()}, {tool.function.name for tool in tools}
    missing = isinstance(choice, NamedTool) and choice.function.name in known - left
    return "auto" if missing else choice


def _begins_answer(body: CountTokensRequest) -> bool:
    """Whether the last message is the beginning of the answer, which the model continues (prefill)."""
    last = body.messages[-1] if body.messages else None
    if last is None or last.role != "assistant":
        return False
    return isinstance(last.content, str) or all(block.get("type") == "text" for block in last.content)


def _system_text(content: str | list[Json]) -> str:
    """The text of a system prompt without the block that serves billing."""
    if isinstance(content, str):
        return content
    texts = [part_text(part, f"system[{index}]") for index, part in enumerate(content)]
    return "".join(text for text in texts if not text.startswith(BILLING))


def _chat_messages(
    role: Literal["user", "assistant", "system"],
    content: str | list[Json],
    where: str,
    last: bool,
    omitted: list[str],
) -> list[ChatMessage]:
    """One message of Anthropic's as chat messages. Tool results become messages of their own: before a user's text, and
    where they stand within an answer.

    A picture is refused in the last message only; `part_text` says what becomes of others.
    """
    if isinstance(content, str):
        return [ChatMessage(role=role, content=content)]
    if role == "system":
        return [ChatMessage(role=role, content=_system_text(content))]
    found: list[ChatMessage] = []
    said = ChatMessage(role=role, content="")
    for index, block in enumerate(content):
        kind, here = str(block.get("type", "text")), f"{where}.content[{index}]"
        if kind == "tool_result" or kind.endswith("_tool_result"):
            if role == "assistant" and _says_something(said):
                found.append(said)
                said = ChatMessage(role=role, content="")
            text = _result(block.get("content"), here, omitted)
            found.append(ChatMessage(role="tool", content=text, tool_call_id=str(block.get("tool_use_id", ""))))
        elif kind in CALLS:
            said.tool_calls = [*(said.tool_calls or []), _call(block, here)]
        elif kind == "thinking":
            thought = str(block.get("thinking", ""))
            said.reasoning_content = f"{said.reasoning_content}\n{thought}" if said.reasoning_content else thought
        elif kind not in SILENT:
            said.content = str(said.content) + _text(block, here, None if last else omitted)
    return found if found and not _says_something(said) else [*found, said]


def _says_something(message: ChatMessage) -> bool:
    return bool(message.content or message.tool_calls or message.reasoning_content)


def _call(block: Json, where: str) -> ToolCall:
    name, arguments = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ApiError(400, f"{where}: a {block['type']} has a name and an input that is an object.")
    return ToolCall(id=str(block.get("id", "")), function=FunctionCall(name=name, arguments=json.dumps(arguments)))


def _result(content: Any, where: str, omitted: list[str]) -> str:
    """What a tool returned: text, blocks, or one object such as what a program printed."""
    if isinstance(content, dict):
        return _text(content, where, omitted)
    if not isinstance(content, list):
        return str(content or "")
    blocks = [block if isinstance(block, dict) else {"text": str(block)} for block in content]
    return "".join(_text(block, f"{where}.content[{index}]", omitted) for index, block in enumerate(blocks))


def _text(block: Json, where: str, omitted: list[str] | None) -> str:
    """What a model can read of a block of any kind."""
    kind = str(block.get("type", "text"))
    source = block.get("source")
    if kind == "tool_reference":  # every tool of a request is in its prompt
        return f"The tool {block.get('tool_name')} can be called.\n"
    if "tool_references" in block:
        return _result(block["tool_references"], where, [])
    if kind == "web_search_result":
        return f"{block.get('title')}\n{block.get('url')}\n\n"
    if kind == "search_result":
        return f"{block.get('title')}\n{source}\n{_result(block.get('content'), where, [])}\n\n"
    if kind == "document" and isinstance(source, dict) and source.get("type") in ("text", "content"):
        inner = source.get("data") if source["type"] == "text" else source.get("content")
        return f"{block.get('title') or 'Document'}\n{_result(inner, where, [])}\n\n"
    if kind.endswith("_error"):
        return f"Error: {block.get('error_code')}"
    if kind.endswith("_result"):
        return json.dumps({name: value for name, value in block.items() if "encrypted" not in name})
    return part_text(block, where, omitted)
