"""One request, alone, in this process."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from stoker.backends.cpu.decoder import Decoder
from stoker.backends.family import PAGE_SIZE
from stoker.engine.engine import Engine, EngineConfig, check_request
from stoker.engine.request import Depth, Stats
from stoker.sampling.mask import TokenMask
from stoker.sampling.settings import Sampling
from stoker.speculate.drafter import Drafter

BuildDrafter = Callable[[int, int], Drafter | None]  # from pages and slots


@dataclass
class Timing:
    """Filled while a generation runs. The first token comes out of prefill, not out of a step."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    steps: int = 0
    stats: Stats | None = None  # the engine's own, at the end


def generate(
    model: Decoder,
    prompt: list[int],
    sampling: Sampling,
    timing: Timing | None = None,
    depth: Depth = 0,
    drafter: BuildDrafter = lambda pages, slots: None,
    tokenizer: Any = None,
    mask: TokenMask | None = None,
) -> Iterator[int]:
    """Token ids as they are made. A stop id is yielded and ends the text, as does the token that completes a stop
    string; `tokenizer` (of the `tokenizers` package) finds those."""
    check_request(model.config, prompt, sampling)
    timing = timing or Timing()
    pages = -(-(len(prompt) + sampling.max_tokens) // PAGE_SIZE)
    built = drafter(pages, 1)
    deepest = depth if isinstance(depth, int) else built.max_depth if built else 0
    engine = Engine(model, EngineConfig(pages=pages, slots=1, max_depth=deepest), built, tokenizer)
    engine.submit(prompt, sampling, depth, mask=mask)
    decoding = False
    while not engine.idle:
        started = time.perf_counter()
        events = engine.step()
        elapsed = time.perf_counter() - started
        if decoding:
            timing.decode_s += elapsed
            timing.steps += 1
        else:
            timing.prefill_s += elapsed
        decoding = decoding or bool(events)
        for event in events:
            yield from event.tokens
            timing.stats = event.stats
            if event.failure:
                raise event.failure
