"""Anthropic's POST /v1/messages, said again as a chat request."""

import json
from typing import Any, Literal

from pydantic import Field

from stoker.server.conversation import text_of
from stoker.server.errors import ApiError
from stoker.server.protocol.chat import (
    ChatMessage,
    ChatRequest,
    Function,
    FunctionCall,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
)
from stoker.server.protocol.common import Json, JsonSchemaFormat, Model, ResponseFormat


class AnthropicMessage(Model):
    role: Literal["user", "assistant", "system"]
    content: str | list[Json]


class AnthropicTool(Model):
    name: str
    description: str | None = None
    input_schema: Json | None = None
    type: str | None = None


class ToolChoice(Model):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Model):
    type: str  # disabled, or one of several ways to think
    budget_tokens: int | None = None


class OutputFormat(Model):
    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Model):
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Model):
    model: str | None = None
    messages: list[AnthropicMessage]
    system: str | list[Json] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None

    def chat(self, **more: Any) -> ChatRequest:
        messages = [ChatMessage(role="system", content=self.system)] if self.system else []
        for place, message in enumerate(self.messages):
            messages += _messages(message, f"messages[{place}]")
        options = {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        return ChatRequest(
            model=self.model,
            messages=messages,
            tools=None if self.tools is None else [_tool(tool) for tool in self.tools],
            chat_template_kwargs=options,
            **more,
        )


class MessagesRequest(CountTokensRequest):
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    output_config: OutputConfig | None = None
    metadata: Json | None = None

    def whole_chat(self) -> ChatRequest:
        choice, parallel = _choice(self.tool_choice)
        wanted = self.output_config.format if self.output_config else None
        schema = wanted and JsonSchemaFormat.model_validate({"schema": wanted.schema_})
        return self.chat(
            max_completion_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            stream=self.stream,
            tool_choice=choice,
            parallel_tool_calls=parallel,
            response_format=schema and ResponseFormat(type="json_schema", json_schema=schema),
        )


def _messages(message: AnthropicMessage, where: str) -> list[ChatMessage]:
    """Tool results are messages of their own here, in front of the text beside them."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    results: list[ChatMessage] = []
    texts: list[Json] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for place, block in enumerate(message.content):
        kind = block.get("type")
        if kind == "tool_result":
            content = block.get("content")
            text = text_of(content if isinstance(content, list) else str(content or ""), f"{where}.content[{place}]")
            results.append(ChatMessage(role="tool", content=text, tool_call_id=str(block.get("tool_use_id", ""))))
        elif kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(block.get("name"), str) or not isinstance(arguments, dict):
                raise ApiError(400, f"{where}.content[{place}]: a tool_use has a name and an input that is an object.")
            function = FunctionCall(name=block["name"], arguments=json.dumps(arguments))
            calls.append(ToolCall(id=str(block.get("id", "")), function=function))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(block)
    if not texts and not calls and results:
        return results
    said = ChatMessage(
        role=message.role,
        content=texts,
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) or None,
    )
    return [*results, said]


def _tool(tool: AnthropicTool) -> Tool:
    if tool.type not in (None, "custom"):
        raise ApiError(400, f"tool {tool.name!r} is of type {tool.type!r}; only tools of the client's own can be used.")
    return Tool(function=Function(name=tool.name, description=tool.description, parameters=tool.input_schema or {}))


def _choice(choice: ToolChoice | None) -> tuple[Any, bool | None]:
    """tool_choice and parallel_tool_calls in OpenAI's words."""
    if choice is None:
        return None, None
    parallel = None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if not choice.name:
            raise ApiError(400, "tool_choice of type tool needs the name of a tool.", param="tool_choice")
        return NamedTool(function=NamedFunction(name=choice.name)), parallel
    return {"any": "required"}.get(choice.type, choice.type), parallel
