"""Tools of Anthropic's /v1/messages as functions.

Anthropic defines some tools by type alone. Tools that the client runs are offered with their arguments spelled out.
Tools that Anthropic's servers would run (search, code execution, MCP) are left out.
"""

from typing import Any

from stoker.server.errors import ApiError
from stoker.server.schemas.chat import Function, Tool
from stoker.server.schemas.common import Json
from stoker.server.schemas.messages import AnthropicTool


def _arguments(required: tuple[str, ...], **properties: Any) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
RANGE = {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}
FILE: Json = {
    "path": {"type": "string", "description": "Absolute path"},
    "file_text": {"type": "string", "description": "For create: the text of the new file"},
    "old_str": {"type": "string", "description": "For str_replace: text that occurs exactly once"},
    "new_str": {"type": "string", "description": "For str_replace: what takes its place"},
    "insert_line": {"type": "integer", "description": "For insert: the line after which, 0 for the beginning"},
    "insert_text": {"type": "string", "description": "For insert: what is inserted"},
    "view_range": {**RANGE, "description": "For view: first and last line, -1 for the end"},
}
EDITOR = Function(
    name="",
    description="View, create and edit text files.",
    parameters=_arguments(
        ("command", "path"), command={"type": "string", "enum": ["view", "create", "str_replace", "insert"]}, **FILE
    ),
)
CLIENT_TOOLS = {  # by the prefix of their type; a date follows
    "bash_": Function(
        name="",
        description="Run a command in a bash session that stays open.",
        parameters=_arguments(
            (), command=TEXT, restart={"type": "boolean", "description": "Instead of a command: start anew"}
        ),
    ),
    "text_editor_": EDITOR,
    "memory_": Function(
        name="",
        description="Keep notes between conversations: files under /memories.",
        parameters=_arguments(
            ("command",),
            command={"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            old_path={"type": "string", "description": "For rename"},
            new_path={"type": "string", "description": "For rename"},
            **FILE,
        ),
    ),
}


def function_tools(tools: list[AnthropicTool] | None, omitted: list[str]) -> list[Tool] | None:
    """The tools as functions. The types of those that cannot be offered are added to `omitted`."""
    if tools is None:
        return None
    found = []
    for index, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            known = next((known for kind, known in CLIENT_TOOLS.items() if tool.type.startswith(kind)), None)
            if known is None or tool.name is None:
                omitted.append(f"tool:{tool.type}")
            else:
                found.append(Tool(function=known.model_copy(update={"name": tool.name})))
        elif tool.name is None:
            raise ApiError(400, f"tools[{index}] has no name.", param="tools")
        else:
            function = Function(
                name=tool.name, description=tool.description, parameters=tool.input_schema or {}, strict=tool.strict
            )
            found.append(Tool(function=function))
    return found
