"""Fields that all generating endpoints share, and parameters that all refuse."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stoker.server.errors import ApiError

Json = dict[str, Any]

# Parameters of other servers and of older APIs that would change an answer. To ignore one would give a wrong answer
# without a word, so it is refused by name. Parameters that change nothing are ignored.
STRUCTURED = (
    "use response_format (/v1/responses: text.format, /v1/messages: output_config.format), or structured_outputs with "
    "json, regex, choice or grammar"
)
SAMPLERS = "use temperature, top_p, top_k, min_p and the penalties"
TEXT_ONLY = "this server reads and writes text only"
UNSUPPORTED = {
    "guided_json": STRUCTURED,
    "guided_regex": STRUCTURED,
    "guided_choice": STRUCTURED,
    "guided_grammar": STRUCTURED,
    "guided_whitespace_pattern": STRUCTURED,
    "structural_tag": STRUCTURED,
    "grammar": STRUCTURED,
    "json_schema": STRUCTURED,
    "regex": STRUCTURED,
    "ebnf": STRUCTURED,
    "output_format": STRUCTURED,
    "functions": "it was replaced by tools",
    "function_call": "it was replaced by tool_choice",
    "chat_template": "only the model's own template is run",
    "documents": "put them into a message",
    "web_search_options": "this server searches nothing; offer a function instead",
    "audio": TEXT_ONLY,
    "prompt_embeds": TEXT_ONLY,
    "input_embeds": TEXT_ONLY,
    "n_predict": "use max_tokens",
    "stop_regex": "use stop, with strings",
    "bad_words": "use logit_bias",
    "allowed_token_ids": "use structured_outputs",
    "logits_processors": "use logit_bias or structured_outputs",
    "custom_logit_processor": "use logit_bias or structured_outputs",
    "truncate_prompt_tokens": "a prompt is read whole; shorten it",
    "lora_path": "no adapters are loaded",
    "mirostat": SAMPLERS,
    "dry_multiplier": SAMPLERS,
    "xtc_probability": SAMPLERS,
    "dynatemp_range": SAMPLERS,
    "typical_p": SAMPLERS,
    "tfs_z": SAMPLERS,
    "top_a": SAMPLERS,
    "samplers": SAMPLERS,
}
NEUTRAL = {"typical_p": 1, "tfs_z": 1}  # values without effect, besides zero and empty ones


class Model(BaseModel):
    """A strict model: 1 is not "1" and true is not 1, since JSON distinguishes them."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


def refuse_unsupported(body: Any) -> None:
    for name in sorted(UNSUPPORTED.keys() & body.keys()) if isinstance(body, dict) else ():
        if body[name] and body[name] != NEUTRAL.get(name):
            raise ApiError(400, f"{name} is not supported: {UNSUPPORTED[name]}.", param=name)


class StreamOptions(Model):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class StructuredOutputs(Model):
    """vLLM's parameter for structured output; exactly one field must be given."""

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
    """A request for an answer. Parameters that would change it and are not supported are refused by name."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        refuse_unsupported(body)
        return body


class SamplingBody(Body):
    """Sampling parameters: OpenAI's and vLLM's extensions."""

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
    draft: bool | None = Field(
        default=None, description="Stoker's own: false decodes this answer without drafts; its tokens are the same"
    )
    return_drafts: bool | None = Field(
        default=None, description="Stoker's own: what was drafted, with every chunk of a stream"
    )
    model: str | None = None
    user: str | None = None
