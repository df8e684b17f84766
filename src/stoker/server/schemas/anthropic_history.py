"""The conversation of a POST /v1/messages as chat messages: blocks of text, thoughts, calls and their results.

Calls of tools that Anthropic's servers would have run, and what came of them, are like any other here.
"""

import json
from typing import Any, Literal

from stoker.server.conversation import part_text
from stoker.server.errors import ApiError
from stoker.server.schemas.chat import ChatMessage, FunctionCall, ToolCall
from stoker.server.schemas.common import Json

BILLING = "x-anthropic-billing-header:"  # a block of Claude Code's, whose digits would keep prompts from being cached
CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
SILENT = ("redacted_thinking", "container_upload", "compaction", "fallback")  # nothing in them for a model to read


def system_text(content: str | list[Json]) -> str:
    """Of a system prompt, without the block that is meant for billing."""
    if isinstance(content, str):
        return content
    texts = [part_text(part, f"system[{place}]") for place, part in enumerate(content)]
    return "".join(text for text in texts if not text.startswith(BILLING))


def chat_messages(
    role: Literal["user", "assistant", "system"],
    content: str | list[Json],
    where: str,
    last: bool,
    omitted: list[str],
) -> list[ChatMessage]:
    """Tool results are messages of their own here: in front of a user's text, in place within an answer.

    Only a picture that the last message shows is refused; for others see `part_text`.
    """
    if isinstance(content, str):
        return [ChatMessage(role=role, content=content)]
    if role == "system":
        return [ChatMessage(role=role, content=system_text(content))]
    found: list[ChatMessage] = []
    said = ChatMessage(role=role, content="")
    for place, block in enumerate(content):
        kind, here = str(block.get("type", "text")), f"{where}.content[{place}]"
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
    return "".join(_text(block, f"{where}.content[{place}]", omitted) for place, block in enumerate(blocks))


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
