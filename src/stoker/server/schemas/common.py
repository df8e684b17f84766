"""What all generating endpoints have in common."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stoker.server.schemas.unsupported import refuse_unsupported

Json = dict[str, Any]


class Model(BaseModel):
    """Strict: 1 is no "1" and true is no 1. JSON knows the difference, and a client's mistake should be told."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class StreamOptions(Model):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class StructuredOutputs(Model):
    """vLLM's own way to ask for structured output; exactly one of them."""

    json_: Json | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class JsonSchemaFormat(Model):
    name: str = "answer"
    description: str | None = None
    schema_: Json | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Model):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None


class Body(Model):
    """A request for an answer: what would change the answer is known, or refused by its name."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        refuse_unsupported(body)
        return body


class Sampled(Body):
    """How tokens are chosen: OpenAI's parameters and vLLM's extras."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, description="0 or -1: all")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_drafts: bool | None = Field(
        default=None, description="Stoker's own: what was drafted, with every chunk of a stream"
    )
    model: str | None = None
    user: str | None = None
