"""Drives engines in tests: requests of every kind, a drafter that knows the answers, a loop that checks the books."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker.backends.cpu.backend import CpuBackend
from stoker.backends.cpu.build import cpu_backend
from stoker.backends.cpu.drafting import CpuDFlash, CpuMtp
from stoker.backends.family import PAGE_SIZE
from stoker.backends.network.decoder import Decoder
from stoker.engine.engine import Engine, EngineConfig
from stoker.engine.event import AUTO, Event
from stoker.sampling.mask import TokenMask
from stoker.sampling.settings import Sampling
from stoker.speculate.choice import DraftChoice
from stoker.speculate.depth.cost import DraftCost
from stoker.speculate.dflash import DFlashDrafter
from stoker.speculate.drafter import Draft, Drafter, DraftRequest, GoOn
from stoker.speculate.mtp import MtpDrafter

PAGES, SLOTS, DEPTH = 24, 4, 6


def engine_on(
    model: Decoder,
    config: EngineConfig,
    drafts: Drafter | CpuMtp | CpuDFlash | None = None,
    tokenizer: Any = None,
    wrap: Callable[[Drafter], Drafter] = lambda own: own,
) -> Engine:
    """An engine on the CPU. `drafts` is what drafts: a drafter, or a network, whose drafter may be wrapped."""
    if isinstance(drafts, CpuMtp | CpuDFlash):
        own = MtpDrafter if isinstance(drafts, CpuMtp) else DFlashDrafter
        drafter = wrap(own(drafts, config.max_depth))  # type: ignore[arg-type]
        return Engine(config, CpuBackend(model, config, drafts), drafter, tokenizer)
    return Engine(config, CpuBackend(model, config), drafts, tokenizer)


def generate(
    model: Decoder,
    prompt: Sequence[int],
    sampling: Sampling,
    draft: str = "none",
    directory: Path = Path(),
    tokenizer: Any = None,
    mask: TokenMask | None = None,
) -> Iterator[int]:
    """Tokens of one request, alone."""
    choice = DraftChoice.parse(draft)
    config = EngineConfig(pages=-(-(len(prompt) + sampling.max_tokens) // PAGE_SIZE), slots=1, max_depth=choice.depth)
    backend, drafter = cpu_backend(model, config, choice, directory)
    engine = Engine(config, backend, drafter, tokenizer)
    engine.submit(prompt, sampling, AUTO if choice.adaptive else choice.depth, mask=mask)
    while not engine.idle:
        for event in engine.step():
            yield from event.tokens
            if event.failure:
                raise event.failure


class Oracle:
    """Knows the right continuation and spoils every `wrong`-th guess, so that blocks are accepted in part."""

    max_depth = DEPTH
    costs: Mapping[str, DraftCost] = {}

    def __init__(self, answers: dict[tuple[int, ...], list[int]], wrong: int) -> None:
        self.answers, self.wrong, self.asked = answers, wrong, 0

    def reset(self, slot: int) -> None: ...

    def propose(self, requests: Sequence[DraftRequest], go_on: GoOn | None = None) -> list[Draft]:
        drafts = []
        for request in requests:
            answer = self.answers[tuple(request.prompt)][len(request.output) :][: request.depth]
            for place in range(len(answer)):
                self.asked += 1
                if self.asked % self.wrong == 0:
                    answer[place] = (answer[place] + 1) % 512
            drafts.append(Draft(answer, [1.0] * len(answer)))
        return drafts


def settings_for(index: int, tokens: int = 20) -> Sampling:
    """Greedy, sampled, filtered and penalised requests in turn."""
    return [
        Sampling(max_tokens=tokens),
        Sampling(max_tokens=tokens, temperature=0.7, top_p=0.9, seed=index),
        Sampling(
            max_tokens=tokens, temperature=1.0, top_k=40, presence_penalty=0.5, repetition_penalty=1.2, seed=index
        ),
        Sampling(max_tokens=tokens, frequency_penalty=0.4, logit_bias={7: 1.5}),
    ][index % 4]


def drain(engine: Engine, limit: int = 2000) -> dict[int, list[int]]:
    """Runs to the end, checking the books after every step. -> tokens by request."""
    return {request: [t for event in events for t in event.tokens] for request, events in run(engine, limit).items()}


def run(engine: Engine, limit: int = 2000) -> dict[int, list[Event]]:
    """Events by request."""
    events: dict[int, list[Event]] = {}
    for _ in range(limit):
        if engine.idle:
            return events
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        engine.check_integrity()
    raise AssertionError("the engine did not come to an end")
