"""Messages and tools of a request, as the model's chat template wants them."""

import json
import re
from collections.abc import Sequence
from typing import Any

from stoker.server.errors import ApiError
from stoker.server.protocol.chat import ChatMessage, Tool
from stoker.server.served import check_text

TOOL_NAME = re.compile(r"[\w.:/-]{1,128}")
MOST_TOOLS = 1024
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def template_messages(messages: Sequence[ChatMessage], most: int) -> list[dict[str, Any]]:
    """Checked, in the template's words: text only, tool arguments as objects, one system message in front."""
    if not messages:
        raise ApiError(400, "messages is empty: a conversation has at least one message.", param="messages")
    if len(messages) > most:
        raise ApiError(400, f"messages has {len(messages):,} entries, and at most {most:,} are taken (--max-messages).")
    found: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
        text = text_of(message.content, f"messages[{place}]")
        if role == "system" and found and all(entry["role"] == "system" for entry in found):
            found[-1]["content"] += "\n\n" + text  # templates take one
            continue
        entry: dict[str, Any] = {"role": role, "content": text}
        if role == "assistant":
            reasoning = message.reasoning_content or message.reasoning
            if reasoning:
                entry["reasoning_content"] = reasoning
            if message.tool_calls:
                entry["tool_calls"] = [
                    {
                        "type": "function",
                        "id": call.id or "",
                        "function": {
                            "name": call.function.name,
                            "arguments": _arguments(call.function.arguments, f"messages[{place}]"),
                        },
                    }
                    for call in message.tool_calls
                ]
        elif role == "tool" and message.tool_call_id:
            entry["tool_call_id"] = message.tool_call_id
        found.append(entry)
    return found


def text_of(content: str | list[dict[str, Any]] | None, where: str) -> str:
    """The text of a message. A part that is none is refused: this model reads text only."""
    if content is None:
        return ""
    if isinstance(content, str):
        check_text(content, where)
        return content
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type", "text")
        if kind not in TEXT_PARTS:
            raise ApiError(
                400,
                f"{where}.content[{place}] is of type {str(kind)[:50]!r}; this server reads text only. "
                "Leave images, audio and files out.",
                param=where,
            )
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise ApiError(400, f"{where}.content[{place}] has no text.", param=where)
        check_text(text, f"{where}.content[{place}]")
        texts.append(text)
    return "".join(texts)


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Checked, as the template prints them; None where there are none."""
    if not tools:
        return None
    if len(tools) > MOST_TOOLS:
        raise ApiError(400, f"tools has {len(tools):,} entries, and at most {MOST_TOOLS:,} are taken.", param="tools")
    names: set[str] = set()
    for tool in tools:
        name = tool.function.name
        if not TOOL_NAME.fullmatch(name):
            raise ApiError(
                400,
                f"a tool is called {name[:200]!r}; names have 1 to 128 letters, digits or any of _ . : / -",
                param="tools",
            )
        if name in names:
            raise ApiError(400, f"two tools are called {name!r}.", param="tools")
        names.add(name)
    return [tool.model_dump(exclude_none=True) for tool in tools]


def tool_schemas(tools: Sequence[Tool]) -> dict[str, Any]:
    return {tool.function.name: tool.function.parameters or {} for tool in tools}


def _arguments(arguments: str | dict[str, Any], where: str) -> dict[str, Any]:
    """Clients send JSON text; templates want the object."""
    if isinstance(arguments, dict):
        return arguments
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{where} has a tool call whose arguments are no JSON: {error}.", param=where) from error
    if not isinstance(found, dict):
        raise ApiError(400, f"{where} has a tool call whose arguments are no JSON object.", param=where)
    return found
