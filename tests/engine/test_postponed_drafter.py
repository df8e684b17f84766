"""A drafter that falls behind while drafting does not pay drafts what one that always keeps up would have drafted:
across preemptions, texts found in the prefix cache, cancellations and neighbours."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.backends.cpu.build import POSTPONE
from stoker.backends.cpu.drafting import CpuDFlash, CpuMtp
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.load import load_drafter
from stoker.engine.engine import EngineConfig
from stoker.engine.event import Event
from stoker.speculate.depth.cost import DraftCost
from stoker.speculate.drafter import Draft, Drafter, DraftRequest, GoOn
from tests.engine.drive import DEPTH, engine_on, run, settings_for
from tests.support.extent import ALL
from tests.support.random_checkpoint import small_config, small_drafter_config, write_random_drafter

VOCAB, REQUESTS = 512, 9
Asked = tuple[int, int, list[int], list[float]]  # slot, length of the text, drafts and their confidence


class Sometimes:
    """Asks for drafts in every other stretch of a text and keeps what came."""

    costs: Mapping[str, DraftCost] = {}

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.max_depth = inner, inner.max_depth
        self.drafts: list[Asked] = []

    def propose(self, requests: Sequence[DraftRequest], go_on: GoOn | None = None) -> list[Draft]:
        asked = [replace(r, free_only=(r.length // 24 + r.prompt[0]) % 2 == 0) for r in requests]
        drafts = self.inner.propose(asked, go_on)
        for request, draft in zip(asked, drafts, strict=True):
            self.drafts.append((request.slot, request.length, list(draft.tokens), list(draft.confidence)))
        return drafts

    def reset(self, slot: int) -> None:
        self.inner.reset(slot)


class Mix:
    """A random course of requests, the same for every drafter."""

    def __init__(self, model: Decoder, folder: Path, kind: str, postpone: int, seed: int) -> None:
        chance = random.Random(seed)
        pages, slots = (8, 14)[seed % 2], 4  # too few for all, or room for what was
        network = (
            CpuMtp(model, pages, slots, postpone=postpone)
            if kind == "mtp"
            else CpuDFlash(model, load_drafter(folder, model.config), pages, postpone=postpone)
        )
        config = EngineConfig(pages, slots, DEPTH, prefill_budget=64, snapshots=6, snapshot_interval=64)
        self.engine = engine_on(model, config, network, wrap=Sometimes)
        assert isinstance(self.engine.drafter, Sometimes)
        self.drafter = self.engine.drafter
        self.answers: dict[int, list[int]] = {}
        texts: dict[int, list[int]] = {}
        prompts = [[chance.randrange(VOCAB) for _ in range(chance.choice([65, 100, 130, 190]))] for _ in range(4)]
        for _ in range(REQUESTS):
            prompt = chance.choice(prompts)
            if texts and chance.random() < 0.6:  # a conversation goes on
                before = chance.choice(list(texts))
                prompt = [*texts[before], *self.answers[before], 5, 6][:220]
            sampling = settings_for(chance.randrange(4), chance.randint(20, 90))
            number = self.engine.submit(prompt, sampling, chance.choice([0, 3, DEPTH, DEPTH]))
            texts[number], self.answers[number] = prompt, []
            for _ in range(chance.randint(0, 12)):
                self._take(self.engine.step())
            if chance.random() < 0.15:
                self.engine.cancel(chance.choice(list(texts)))
        for events in run(self.engine).values():
            self._take(events)

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            self.answers[event.request_id] += event.tokens


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_a_drafter_that_fell_behind_drafts_the_same(model: Decoder, tmp_path: Path, kind: str) -> None:
    write_random_drafter(tmp_path, small_drafter_config(small_config()))
    preemptions = cached = drafts = 0
    for seed in range(6 if ALL else 2):
        timely, late = (Mix(model, tmp_path, kind, postpone, seed) for postpone in (0, POSTPONE))
        assert late.drafter.drafts == timely.drafter.drafts
        assert late.answers == timely.answers
        stats = late.engine.stats()
        preemptions += stats.preemptions
        cached += stats.totals.cached_tokens
        drafts += sum(bool(tokens) for _, _, tokens, _ in late.drafter.drafts)
    assert preemptions > 0
    assert cached > 500
    assert drafts > 50
