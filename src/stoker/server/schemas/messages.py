"""The bodies of Anthropic's POST /v1/messages and /v1/messages/count_tokens."""

from typing import Any, Literal

from pydantic import Field

from stoker.server.schemas.common import Body, Json, Model


class AnthropicMessage(Model):
    role: Literal["user", "assistant", "system"]
    content: str | list[Json]


class AnthropicTool(Model):
    name: str | None = None  # an MCP toolset has none
    description: str | None = None
    input_schema: Json | None = None
    strict: bool | None = None
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


class CountTokensRequest(Body):
    model: str | None = None
    messages: list[AnthropicMessage]
    system: str | list[Json] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    thread: Any = None


class MessagesRequest(CountTokensRequest):
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    output_config: OutputConfig | None = None
    metadata: Json | None = None
