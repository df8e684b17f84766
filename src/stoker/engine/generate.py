"""One request, alone, in this process: prompt in prefill chunks, then one step per token."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from stoker.engine.sampler import Row, choose
from stoker.engine.sampling import Sampling
from stoker.errors import RequestError
from stoker.model.batch import Batch, Run
from stoker.model.cache import PAGE_SIZE, Cache
from stoker.model.decoder import Decoder
from stoker.ops.family import Family

PREFILL_CHUNK = 512  # tokens; a multiple of 64, so that chunking never shows in the bits


@dataclass
class Timing:
    """Filled while a generation runs. The first token comes out of prefill, so a step more is a token more."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    steps: int = 0


def check_request(prompt: list[int], sampling: Sampling, model: Decoder) -> None:
    """Refuses what cannot be served, with the numbers."""
    if not prompt:
        raise RequestError("the prompt is empty: it has 0 tokens, expected at least 1.")
    outside = [token for token in prompt if not 0 <= token < model.config.vocab_size]
    if outside:
        raise RequestError(f"token id {outside[0]} is outside the vocabulary of {model.config.vocab_size:,}.")
    need, context = len(prompt) + sampling.max_tokens, model.config.max_positions
    if need > context:
        raise RequestError(
            f"prompt has {len(prompt):,} tokens and max_tokens asks {sampling.max_tokens:,}: "
            f"{need:,} > context {context:,}. Shorten the prompt or lower max_tokens."
        )


@torch.inference_mode()
def generate(model: Decoder, prompt: list[int], sampling: Sampling, timing: Timing | None = None) -> Iterator[int]:
    """Token ids as they are made. A stop id is yielded and ends the text."""
    check_request(prompt, sampling, model)
    timing = timing or Timing()
    weight = model.embed_tokens.weight
    pages = list(range(-(-(len(prompt) + sampling.max_tokens) // PAGE_SIZE)))
    cache = Cache.allocate(model.config, pages=len(pages), slots=1, dtype=weight.dtype, device=weight.device)

    def forward(family: Family, tokens: list[int], cached: int, replay: int = 0) -> torch.Tensor:
        """Logits after the last of `tokens`."""
        batch = Batch.of(family, [Run(tokens, cached, 0, pages, replay)], PAGE_SIZE, weight.device)
        hidden, _ = model(batch, cache)
        return model.logits(hidden[batch.last_rows])[0]

    def choice(logits: torch.Tensor) -> int:
        return int(choose(logits[None], [Row(sampling, len(prompt) + len(output), prompt, output)]))

    output: list[int] = []
    started = time.perf_counter()
    for begin in range(0, len(prompt), PREFILL_CHUNK):
        logits = forward(Family.PREFILL, prompt[begin : begin + PREFILL_CHUNK], begin)
    output.append(choice(logits))
    timing.prefill_s = time.perf_counter() - started
    yield output[-1]
    while len(output) < sampling.max_tokens and output[-1] not in sampling.stop_ids:
        started = time.perf_counter()
        logits = forward(Family.STEP, output[-1:], len(prompt) + len(output) - 1, replay=min(timing.steps, 1))
        output.append(choice(logits))
        timing.decode_s += time.perf_counter() - started
        timing.steps += 1
        yield output[-1]
