"""Parameters of other servers and older APIs that would change an answer. Ignoring them would be a wrong answer without
a word, so they are refused by name; parameters that change nothing are ignored."""

from typing import Any

from stoker.server.errors import ApiError

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
NEUTRAL = {"typical_p": 1, "tfs_z": 1}  # values that ask for nothing, besides zero and empty ones


def refuse_unsupported(body: Any) -> None:
    for name in sorted(UNSUPPORTED.keys() & body.keys()) if isinstance(body, dict) else ():
        if body[name] and body[name] != NEUTRAL.get(name):
            raise ApiError(400, f"{name} is not supported: {UNSUPPORTED[name]}.", param=name)
