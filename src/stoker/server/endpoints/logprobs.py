"""Log-probabilities in OpenAI's two formats, and those of prompts in vLLM's."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from stoker.engine.event import TokenLogprob
from stoker.server.model import ServedModel


def chat_logprobs(found: Iterable[TokenLogprob], model: ServedModel) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = model.token_text(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8"))}

    return {
        "content": [
            {**entry(each.token, each.logprob), "top_logprobs": [entry(*top) for top in each.top]} for each in found
        ],
        "refusal": None,
    }


def completion_logprobs(found: Sequence[TokenLogprob], model: ServedModel, offset: int) -> dict[str, Any]:
    """`offset` is the position in the text at which the first of these tokens begins."""
    texts = [model.token_text(each.token) for each in found]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [_finite(each.logprob) for each in found],
        "top_logprobs": [{model.token_text(token): _finite(value) for token, value in each.top} for each in found],
        "text_offset": offsets,
    }


def echoed_logprobs(
    prompt: Sequence[int], found: Sequence[TokenLogprob], model: ServedModel, top: int
) -> dict[str, Any]:
    """Log-probabilities of an echoed prompt, each with the `top` likeliest tokens. The first token has none, since
    nothing precedes it."""
    first = model.token_text(prompt[0])
    rest = completion_logprobs([replace(each, top=each.top[:top]) for each in found], model, len(first))
    return {
        "tokens": [first, *rest["tokens"]],
        "token_logprobs": [None, *rest["token_logprobs"]],
        "top_logprobs": [None, *rest["top_logprobs"]],
        "text_offset": [0, *rest["text_offset"]],
    }


def prompt_logprobs(found: Sequence[TokenLogprob], model: ServedModel, top: int) -> list[dict[str, Any] | None]:
    """vLLM's format: a list by position in the prompt, each entry by token id."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": model.token_text(token)}

    shown: list[dict[str, Any] | None] = [None]
    for each in found:
        likeliest = {str(token): entry(token, value, 1 + index) for index, (token, value) in enumerate(each.top[:top])}
        shown.append({**likeliest, str(each.token): entry(each.token, each.logprob, each.rank)})
    return shown


def _finite(logprob: float) -> float:
    """JSON has no infinity; -9999 is what the APIs write for an impossible token."""
    return max(logprob, -9999.0)
