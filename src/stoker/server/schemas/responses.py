"""The body of OpenAI's POST /v1/responses."""

from typing import Any

from pydantic import model_validator

from stoker.server.errors import ApiError
from stoker.server.schemas.common import Json, SamplingBody

ELSEWHERE = {  # parameters of chat completions that have another name here
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "prompt_logprobs": "/v1/completions or /v1/chat/completions",
}


class ResponsesRequest(SamplingBody):
    """The sampling parameters beyond OpenAI's are those of chat completions."""

    input: str | list[Json]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    text: Json | None = None
    reasoning: Json | None = None
    store: bool | None = None
    metadata: Json | None = None
    include: list[str] | None = None
    truncation: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    chat_template_kwargs: Json | None = None
    thinking_token_budget: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_names_of_chat(cls, body: Any) -> Any:
        for name, place in ELSEWHERE.items():
            if isinstance(body, dict) and body.get(name) is not None:
                raise ApiError(400, f"{name} is not a parameter of /v1/responses; use {place}.", param=name)
        return body

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
