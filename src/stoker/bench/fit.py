"""Prompts with an exact number of tokens: filler is added word by word until the server's own count matches."""

from collections.abc import Callable
from typing import Any

from stoker.bench.texts import Material
from stoker.bench.tokens import Counter, Refused

Body = dict[str, Any]
STEP = 64  # if the task alone is too long, the target becomes the next multiple of this
PROBE_LIMIT = 2048  # if counting costs a prefill, longer prompts are scaled from a sample instead of searched


async def fit(
    render: Callable[[str], Body], material: Material, target: int, counter: Counter
) -> tuple[Body, int | None]:
    """The body whose filler brings it to `target` tokens, and the tokens it has by this counter.

    A server that refuses even the one-token requests it would be counted by is sent the bare task, of unknown length:
    its refusals are what there is to measure.
    """
    try:
        return await _fit(render, material, target, counter)
    except Refused:
        if counter.cheap:
            raise
        return render(""), None


async def _fit(render: Callable[[str], Body], material: Material, target: int, counter: Counter) -> tuple[Body, int]:

    async def length(words: int, pad: int = 0) -> int:
        return await counter.chat(render(_filled(material, words, pad)))

    low, low_tokens = 0, await length(0)
    if low_tokens > target:
        target = -(-low_tokens // STEP) * STEP
    if not counter.cheap and target > PROBE_LIMIT:
        sample = 400
        per_word = (await length(sample) - low_tokens) / sample
        words = int((target - low_tokens) / per_word)
        return render(_filled(material, words, 0)), target
    high, high_tokens = low, low_tokens
    while high_tokens <= target:  # a word is about a token and a third
        low, low_tokens = high, high_tokens
        high += max(8, int((target - high_tokens) * 0.8) + 1)
        high_tokens = await length(high)
    while high - low > 1:
        share = (target - low_tokens) / (high_tokens - low_tokens)
        middle = min(max(low + round(share * (high - low)), low + 1), high - 1)
        tokens = await length(middle)
        if tokens <= target:
            low, low_tokens = middle, tokens
        else:
            high, high_tokens = middle, tokens
        if low_tokens == target:
            break
    pad, tokens = 0, low_tokens
    for _ in range(6):  # the last word overshot by a token: short words fill the gap
        if tokens == target:
            break
        pad = max(pad + target - tokens, 0)
        tokens = await length(low, pad)
    if low == 0 and tokens < target:  # the sentence that introduces the filler is too long by itself
        return await _fit(render, material, (target // STEP + 1) * STEP, counter)
    return render(_filled(material, low, pad)), tokens


def _filled(material: Material, words: int, pad: int) -> str:
    return material.first(words).strip() + " a" * pad
