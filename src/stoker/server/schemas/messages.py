"""Anthropic's POST /v1/messages, said again as a chat request."""

from typing import Any, Literal

from pydantic import Field

from stoker.server.conversation import newest_place
from stoker.server.errors import ApiError
from stoker.server.schemas.anthropic_history import chat_messages, system_text
from stoker.server.schemas.anthropic_tools import AnthropicTool, offered
from stoker.server.schemas.chat import ChatMessage, ChatRequest, NamedFunction, NamedTool, Tool
from stoker.server.schemas.common import Body, Json, JsonSchemaFormat, Model, ResponseFormat


class AnthropicMessage(Model):
    role: Literal["user", "assistant", "system"]
    content: str | list[Json]


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

    @property
    def prefilled(self) -> bool:
        """The answer has been begun, and is to be continued."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant":
            return False
        return isinstance(last.content, str) or all(block.get("type") == "text" for block in last.content)

    def chat(self, **more: Any) -> ChatRequest:
        if self.thread is not None:
            raise ApiError(
                400,
                "thread is not supported: messages are not kept. Send the whole conversation without thread.",
                anthropic_code="thread_unsupported_request",
            )
        omitted: list[str] = []
        messages = [ChatMessage(role="system", content=system_text(self.system))] if self.system else []
        newest = newest_place([message.role for message in self.messages])
        for place, message in enumerate(self.messages):
            where = f"messages[{place}]"
            messages += chat_messages(message.role, message.content, where, place == newest, omitted)
        tools = offered(self.tools, omitted)
        if "tool_choice" in more:
            more["tool_choice"] = self._possible(more["tool_choice"], tools)
        options = {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        chat = ChatRequest(
            model=self.model,
            messages=messages,
            tools=tools,
            chat_template_kwargs=options,
            continue_final_message=self.prefilled or None,
            **more,
        )
        chat.omitted.extend(omitted)
        return chat

    def _possible(self, choice: Any, tools: list[Tool] | None) -> Any:
        """A call that only tools left out could answer is not forced."""
        if len(tools or ()) == len(self.tools or ()):
            return choice
        if not tools:
            return None
        known, left = {tool.name for tool in self.tools or ()}, {tool.function.name for tool in tools}
        missing = isinstance(choice, NamedTool) and choice.function.name in known - left
        return "auto" if missing else choice


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
            thinking_token_budget=self.thinking and self.thinking.budget_tokens,
            response_format=schema and ResponseFormat(type="json_schema", json_schema=schema),
        )


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
