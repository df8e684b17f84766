"""POST /v1/chat/completions, and what of it other endpoints share."""

from typing import Any, Literal

from pydantic import Field

from stoker.server.protocol.common import Json, Model, ResponseFormat, Sampled


class FunctionCall(Model):
    name: str
    arguments: str | Json = "{}"


class ToolCall(Model):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


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
    type: Literal["function"] = "function"
    function: Function


class NamedFunction(Model):
    name: str


class NamedTool(Model):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(Sampled):
    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Json | None = None
    chat_template: str | None = Field(default=None, description="Refused: only the model's own template is run")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
