"""Messages and tools of a request in the form that chat templates expect."""

import json
from collections.abc import Sequence
from typing import Any

from stoker.server.errors import ApiError
from stoker.server.model import check_text
from stoker.server.output.tags import TOOL_NAME
from stoker.server.schemas.chat import ChatMessage, Tool

MOST_TOOLS = 1024
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
IMAGE_PARTS = ("image", "image_url", "input_image")


def template_messages(
    messages: Sequence[ChatMessage], most: int, omitted: list[str] | None = None
) -> list[dict[str, Any]]:
    """The messages, validated: text only, tool arguments as objects, one system message at the beginning.

    A picture in the last message is refused. Earlier pictures, and those that tools returned, are replaced by a note
    and added to `omitted`: clients send them again with every turn, and that should not end a session.
    """
    omitted = [] if omitted is None else omitted
    if not messages:
        raise ApiError(400, "messages is empty: a conversation has at least one message.", param="messages")
    if len(messages) > most:
        raise ApiError(400, f"messages has {len(messages):,} entries, and at most {most:,} are taken (--max-messages).")
    found: list[dict[str, Any]] = []
    newest = newest_message([message.role for message in messages])
    for index, message in enumerate(messages):
        role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
        refused = index == newest and role != "tool"
        text = text_of(message.content, f"messages[{index}]", None if refused else omitted)
        if role == "system" and found and all(entry["role"] == "system" for entry in found):
            found[-1]["content"] += "\n\n" + text  # templates accept one system message
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
                            "arguments": _arguments(call.function.arguments, f"messages[{index}]"),
                        },
                    }
                    for call in message.tool_calls
                ]
        elif role == "tool" and message.tool_call_id:
            entry["tool_call_id"] = message.tool_call_id
        found.append(entry)
    return found


def newest_message(roles: Sequence[str]) -> int:
    """The index of the last message that is not an instruction, or -1."""
    return max((index for index, role in enumerate(roles) if role not in ("system", "developer")), default=-1)


def text_of(content: str | list[dict[str, Any]] | None, where: str, omitted: list[str] | None = None) -> str:
    """The text of a message. `part_text` says what becomes of parts that are not text."""
    if content is None:
        return ""
    if isinstance(content, str):
        check_text(content, where)
        return content
    return "".join(part_text(part, f"{where}.content[{index}]", omitted) for index, part in enumerate(content))


def part_text(part: dict[str, Any], where: str, omitted: list[str] | None = None) -> str:
    """The text of one part. A part that is not text, such as a picture, becomes a note and is added to `omitted`. If
    `omitted` is None it is refused, with the wording by which clients know what to leave out."""
    kind = part.get("type", "text")
    if kind in TEXT_PARTS:
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise ApiError(400, f"{where} has no text.", param=where)
        check_text(text, where)
        return text
    named = "image" if kind in IMAGE_PARTS else str(kind)[:50]
    refused = f"Could not process {named}"
    if omitted is not None:
        omitted.append(named)
        return f"[{refused}: this model reads text only.]"
    raise ApiError(
        400,
        f"{refused}: {where} is of type {str(kind)[:50]!r}, and this model reads text only. Leave it out.",
        param=where,
        code="invalid_image" if named == "image" else None,
    )


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """The tools, validated, as templates print them; None if there are none."""
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
                f"a tool is called {name[:200]!r}; names have 1 to 256 letters, digits or any of _ . : / -",
                param="tools",
            )
        if name in names:
            raise ApiError(400, f"two tools are called {name!r}.", param="tools")
        names.add(name)
    return [{**tool.model_dump(exclude_none=True), "type": "function"} for tool in tools]


def tool_schemas(tools: Sequence[Tool]) -> dict[str, Any]:
    return {tool.function.name: tool.function.parameters or {} for tool in tools}


def _arguments(arguments: str | dict[str, Any], where: str) -> dict[str, Any]:
    """The arguments of a call as an object: clients send JSON text."""
    if isinstance(arguments, dict):
        return arguments
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{where} has a tool call whose arguments are not JSON: {error}.", param=where) from error
    if not isinstance(found, dict):
        raise ApiError(400, f"{where} has a tool call whose arguments are not a JSON object.", param=where)
    return found
