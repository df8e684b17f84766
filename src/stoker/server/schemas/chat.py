"""The body of POST /v1/chat/completions, parts of which other endpoints share."""

import json
from typing import Any, Literal, Self

from pydantic import ModelWrapValidatorHandler, PrivateAttr, model_validator

from stoker.server.output.custom import CUSTOM_INPUT
from stoker.server.schemas.common import Json, Model, ResponseFormat, SamplingBody


class FunctionCall(Model):
    name: str
    arguments: str | Json = "{}"


class ToolCall(Model):
    """A function call. A call of a custom tool becomes one whose only argument is the text."""

    id: str | None = None
    type: Literal["function", "custom"] = "function"
    function: FunctionCall

    @model_validator(mode="before")
    @classmethod
    def _of_custom(cls, call: Any) -> Any:
        custom = _custom(call)
        if custom is None:
            return call
        return {**call, "function": {**custom, "arguments": json.dumps({CUSTOM_INPUT: custom.get("input", "")})}}


class ChatMessage(Model):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Json] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Model):
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Model):
    """A function tool. A custom tool becomes a function that takes one string."""

    type: Literal["function", "custom"] = "function"
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _of_custom(cls, tool: Any) -> Any:
        custom = _custom(tool)
        return tool if custom is None else {**tool, "function": _text_function(custom)}


class NamedFunction(Model):
    name: str


class NamedTool(Model):
    type: Literal["function", "custom"] = "function"
    function: NamedFunction

    @model_validator(mode="before")
    @classmethod
    def _of_custom(cls, choice: Any) -> Any:
        custom = _custom(choice)
        return choice if custom is None else {**choice, "function": custom}


class AllowedTools(Model):
    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool]


class AllowedToolsChoice(Model):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChatRequest(SamplingBody):
    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Json | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    modalities: list[str] | None = None
    _omitted: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _leave_out(cls, body: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        """Leaves out tools that are neither functions nor custom, which another server would have to run."""
        if not isinstance(body, dict):
            return check(body)
        omitted: list[str] = []
        body = {**body, "tools": _own(body.get("tools"), "tool", omitted)}
        choice = body.get("tool_choice")
        if _is_foreign(choice) and choice["type"] != "allowed_tools":  # treated as if it was not given
            omitted.append(f"tool_choice:{choice['type']}")
            body["tool_choice"] = "auto"
        elif _is_foreign(choice) and isinstance(allowed := choice.get("allowed_tools"), dict):
            left = _own(allowed.get("tools"), "tool_choice", omitted)
            body["tool_choice"] = {**choice, "allowed_tools": {**allowed, "tools": left}}
        found = check(body)
        found.omitted.extend(omitted)
        return found

    @property
    def omitted(self) -> list[str]:
        """Parts of the request that were left out, such as `tool:web_search_20250305`. Translations from other APIs
        append to it; the response names them in the header x-stoker-omitted."""
        return self._omitted

    @property
    def custom_tools(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.tools or () if tool.type == "custom")

    @property
    def template_options(self) -> Json:
        """Options for the template. Effort none disables thinking; any other is passed on and enables it."""
        effort = self.reasoning_effort
        if effort is None:
            found: Json = {}
        elif effort == "none":
            found = {"enable_thinking": False}
        else:
            found = {"enable_thinking": True, "reasoning_effort": effort}
        return {**found, **(self.chat_template_kwargs or {})}


def _own(tools: Any, what: str, omitted: list[str]) -> Any:
    """The tools without those of foreign types, which are added to `omitted`."""
    if not isinstance(tools, list):
        return tools
    omitted.extend(f"{what}:{tool['type']}" for tool in tools if _is_foreign(tool))
    return [tool for tool in tools if not _is_foreign(tool)]


def _is_foreign(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind not in ("function", "custom") and "function" not in tool


def _custom(given: Any) -> Json | None:
    """The `custom` part of a tool, call or choice; None if it has another type."""
    if not isinstance(given, dict) or given.get("type") != "custom" or not isinstance(given.get("custom"), dict):
        return None
    found: Json = given["custom"]
    return found


def _text_function(custom: Json) -> Json:
    """A custom tool as a function. Its grammar is described to the model and not enforced."""
    wanted = custom.get("format")
    wanted = wanted if isinstance(wanted, dict) else {}
    grammar = wanted.get("grammar", wanted)  # chat completions nest it, responses do not
    told = custom.get("description") or ""
    if wanted.get("type") == "grammar" and isinstance(grammar, dict):
        told = f"{told}\n\nThe input follows this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}".strip()
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string", "description": "The whole input, as plain text."}},
        "required": [CUSTOM_INPUT],
    }
    return {"name": custom.get("name"), "description": told or None, "parameters": parameters}
