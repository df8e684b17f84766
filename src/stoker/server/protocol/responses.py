"""OpenAI's POST /v1/responses, said again as a chat request."""

from typing import Any

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

ROLES = ("user", "assistant", "system", "developer")
STATEFUL = {
    "previous_response_id": "responses are not kept; send the whole conversation as input",
    "conversation": "conversations are not kept; send the whole conversation as input",
    "background": "a response is made while its client waits",
    "prompt": "prompt templates are not kept",
}


class ResponsesRequest(Model):
    model: str | None = None
    input: str | list[Json]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    text: Json | None = None
    reasoning: Json | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: Json | None = None
    include: list[str] | None = None
    truncation: str | None = None
    user: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    chat_template_kwargs: Json | None = None

    def chat(self) -> ChatRequest:
        for name, reason in STATEFUL.items():
            if getattr(self, name):
                raise ApiError(400, f"{name} is not supported: {reason}.", param=name)
        return ChatRequest(
            model=self.model,
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=self.wants_logprobs or None,
            top_logprobs=self.top_logprobs if self.wants_logprobs else None,
            tools=None if self.tools is None else [_tool(tool) for tool in self.tools],
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_format(self.text),
            chat_template_kwargs=self._options(),
            stream=self.stream,
        )

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    def _options(self) -> Json:
        """Effort none is a wish not to think; other efforts are no finer than the template's switch."""
        effort = (self.reasoning or {}).get("effort")
        thinking = {} if effort is None else {"enable_thinking": effort != "none"}
        return {**thinking, **(self.chat_template_kwargs or {})}

    def _messages(self) -> list[ChatMessage]:
        found = [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*found, ChatMessage(role="user", content=self.input)]
        for place, item in enumerate(self.input):
            _add(found, item, f"input[{place}]")
        return found


def _add(found: list[ChatMessage], item: Json, where: str) -> None:
    """Items of one answer (a thought, a text, calls) are one message here."""
    kind = item.get("type", "message")
    if kind == "message":
        role, content = item.get("role"), item.get("content")
        if role not in ROLES or not isinstance(content, str | list):
            raise ApiError(400, f"{where}: a message has a role ({', '.join(ROLES)}) and content.", param=where)
        text = text_of(_parts(content, where), where)
        if role == "assistant" and found and found[-1].role == "assistant" and not found[-1].tool_calls:
            found[-1].content = str(found[-1].content or "") + text
        else:
            found.append(ChatMessage(role=role, content=text))
    elif kind == "function_call":
        name, arguments = item.get("name"), item.get("arguments", "{}")
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise ApiError(400, f"{where}: a function_call has a name and arguments, both texts.", param=where)
        if not found or found[-1].role != "assistant":
            found.append(ChatMessage(role="assistant", content=""))
        call = ToolCall(id=str(item.get("call_id", "")), function=FunctionCall(name=name, arguments=arguments))
        found[-1].tool_calls = [*(found[-1].tool_calls or []), call]
    elif kind == "function_call_output":
        output = item.get("output", "")
        text = output if isinstance(output, str) else text_of(_parts(output, where), where)
        found.append(ChatMessage(role="tool", content=text, tool_call_id=str(item.get("call_id", ""))))
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        thought = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
        if thought:
            found.append(ChatMessage(role="assistant", content="", reasoning_content=thought))
    else:
        raise ApiError(
            400,
            f"{where} is of type {str(kind)[:50]!r}; this server knows messages, reasoning, calls and their outputs.",
            param=where,
        )


def _parts(content: Any, where: str) -> str | list[Json]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ApiError(400, f"{where}: content is a text or a list of parts.", param=where)
    return content


def _tool(tool: Json) -> Tool:
    if tool.get("type", "function") != "function":
        raise ApiError(
            400, f"a tool is of type {str(tool.get('type'))[:50]!r}; only functions of the client's own can be used."
        )
    name, parameters = tool.get("name"), tool.get("parameters")
    if not isinstance(name, str) or not isinstance(parameters, dict | None):
        raise ApiError(400, "a function tool has a name, and its parameters are a JSON schema.", param="tools")
    description = tool.get("description")
    return Tool(function=Function(name=name, description=str(description or "") or None, parameters=parameters))


def _choice(choice: str | Json | None) -> Any:
    if isinstance(choice, dict):
        if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
            raise ApiError(400, "tool_choice is none, auto, required or a function by name.", param="tool_choice")
        return NamedTool(function=NamedFunction(name=choice["name"]))
    if choice not in (None, "none", "auto", "required"):
        raise ApiError(400, f"tool_choice is {choice[:50]!r}, expected none, auto or required.", param="tool_choice")
    return choice


def _format(text: Json | None) -> ResponseFormat | None:
    wanted = (text or {}).get("format")
    if not isinstance(wanted, dict):
        return None
    kind = wanted.get("type", "text")
    if kind not in ("text", "json_object", "json_schema"):
        raise ApiError(400, f"text.format is of type {str(kind)[:50]!r}, expected text, json_object or json_schema.")
    schema = wanted.get("schema")
    if kind != "json_schema":
        return ResponseFormat(type=kind)
    if not isinstance(schema, dict):
        raise ApiError(400, "text.format is json_schema, but it has no schema.", param="text.format")
    return ResponseFormat(type=kind, json_schema=JsonSchemaFormat.model_validate({"schema": schema}))
