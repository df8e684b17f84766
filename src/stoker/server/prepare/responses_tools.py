"""Tools of OpenAI's /v1/responses as functions of a chat request.

Custom tools and functions in namespaces are offered. Tools that OpenAI's servers would run (search, MCP, code) and
tools with item types of their own (shells, patches, computers) are left out.
"""

from typing import Any

from stoker.server.errors import ApiError
from stoker.server.schemas.chat import AllowedTools, AllowedToolsChoice, Function, NamedFunction, NamedTool, Tool
from stoker.server.schemas.common import Json


def flat_name(namespace: Any, name: str) -> str:
    """The name by which the model calls a function of a namespace."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


def namespaces(tools: list[Json] | None) -> dict[str, tuple[str, str]]:
    """The namespace and name of each function in one, by its flat name."""
    found = {}
    for tool in tools or ():
        for inner in _inside(tool):
            if inner.get("type", "function") not in ("function", "custom"):
                continue
            space, name = str(tool.get("name")), str(inner.get("name"))
            found[flat_name(space, name)] = (space, name)
    return found


def function_tools(tools: list[Json] | None, omitted: list[str]) -> list[Tool] | None:
    """The tools as functions. The types of those that cannot be offered are added to `omitted`."""
    if tools is None:
        return None
    found = []
    for tool in tools:
        if tool.get("type") == "namespace":
            each = [_tool(inner, tool, omitted) for inner in _inside(tool)]
        else:
            each = [_tool(tool, None, omitted)]
        found += [one for one in each if one is not None]
    return found


def translated_choice(choice: str | Json | None, tools: list[Json] | None, omitted: list[str]) -> Any:
    """tool_choice of the chat request. A choice of a tool that was left out becomes auto."""
    if not isinstance(choice, dict):
        if choice not in (None, "none", "auto", "required"):
            raise ApiError(
                400, f"tool_choice is {choice[:50]!r}, expected none, auto or required.", param="tool_choice"
            )
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        wanted, mode = choice.get("tools"), choice.get("mode", "auto")
        if not isinstance(wanted, list) or mode not in ("auto", "required"):
            message = "tool_choice allowed_tools has a mode (auto or required) and a list of tools."
            raise ApiError(400, message, param="tool_choice")
        named = [name for entry in wanted for name in _named(entry, tools, omitted)]
        allowed = [NamedTool(function=NamedFunction(name=name)) for name in named]
        return AllowedToolsChoice(type=kind, allowed_tools=AllowedTools(mode=mode, tools=allowed))
    named = _named(choice, tools, omitted)
    return NamedTool(function=NamedFunction(name=named[0])) if named else "auto"


def _named(entry: Any, tools: list[Json] | None, omitted: list[str]) -> list[str]:
    """The flat names of the functions that an entry of tool_choice refers to; none if it was left out."""
    kind = entry.get("type") if isinstance(entry, dict) else None
    if not isinstance(kind, str):
        raise ApiError(
            400, "tool_choice is none, auto, required, allowed_tools or a tool by name.", param="tool_choice"
        )
    name, inside = entry.get("name"), namespaces(tools)
    if kind == "namespace":
        return [flat for flat, (space, _) in inside.items() if space == name]
    if kind not in ("function", "custom"):
        omitted.append(f"tool_choice:{kind}")
        return []
    if not isinstance(name, str):
        raise ApiError(400, f"tool_choice is a {kind}, but it has no name.", param="tool_choice")
    flat = flat_name(entry.get("namespace"), name)
    if any(tool.get("name") == flat for tool in tools or ()):
        return [flat]
    return [full for full, (_, inner) in inside.items() if inner == flat][:1] or [flat]


def _inside(tool: Json) -> list[Json]:
    inner = tool.get("tools") if tool.get("type") == "namespace" else []
    if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
        raise ApiError(400, "a namespace has a name and a list of tools.", param="tools")
    return inner


def _tool(tool: Json, namespace: Json | None, omitted: list[str]) -> Tool | None:
    kind, name, parameters = tool.get("type", "function"), tool.get("name"), tool.get("parameters")
    if kind not in ("function", "custom"):
        omitted.append(f"tool:{kind}")
        return None
    if not isinstance(name, str) or not isinstance(parameters, dict | None):
        raise ApiError(400, "a function tool has a name, and its parameters are a JSON schema.", param="tools")
    told = str(tool.get("description") or "")
    if namespace is not None:
        if tool is namespace["tools"][0] and namespace.get("description"):  # described once for the whole namespace
            told = f"{told}\n\nAbout {namespace.get('name')}: {namespace['description']}".strip()
        name = flat_name(namespace.get("name"), name)
    if kind == "custom":
        custom = {"name": name, "description": told, "format": tool.get("format")}
        return Tool.model_validate({"type": "custom", "custom": custom})
    strict = tool.get("strict") is True or None
    return Tool(function=Function(name=name, description=told or None, parameters=parameters, strict=strict))
