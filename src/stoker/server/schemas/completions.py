"""The bodies of POST /v1/completions, /tokenize and /detokenize."""

from stoker.server.schemas.chat import ChatMessage, Tool
from stoker.server.schemas.common import Json, Model, ResponseFormat, SamplingBody


class CompletionRequest(SamplingBody):
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None


class TokenizeRequest(Model):
    """A text, or a conversation as the chat template renders it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: Json | None = None


class DetokenizeRequest(Model):
    model: str | None = None
    tokens: list[int]
