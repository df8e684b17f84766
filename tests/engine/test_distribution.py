"""Sampling is right, not only consistent: with adaptive depth four tokens in a row, three of them behind drafts, are
distributed as the model says; a chooser that is a little wrong is found by the same test."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from stoker.backends.network.batch import Batch
from stoker.backends.network.cache import Cache
from stoker.engine.engine import EngineConfig
from stoker.engine.event import AUTO, Totals
from stoker.sampling.sampler import Row, choose
from stoker.sampling.settings import Sampling
from stoker.speculate.depth.cost import DraftCost, StepBytes
from stoker.speculate.drafter import Draft, DraftRequest, GoOn, accept
from tests.engine.drive import engine_on
from tests.engine.mock import MockModel
from tests.support.extent import ALL

WORDS, SAMPLES = 6, 50_000 if ALL else 12_000
TOKENS = 4  # the first token is the prompt's, three are left for blocks of two drafts
SLOTS = 32  # with two drafts each within the rows of one step
SETTINGS = [
    Sampling(max_tokens=TOKENS, temperature=1.0),
    Sampling(max_tokens=TOKENS, temperature=0.6, top_p=0.9),
    Sampling(max_tokens=TOKENS, temperature=1.5, top_p=0.75),
    Sampling(max_tokens=TOKENS, temperature=1.0, top_k=4),
]


def table(seed: int, words: int = WORDS) -> Tensor:
    """Logits of the next word after each word."""
    return torch.randn(words, words, generator=torch.Generator().manual_seed(seed)) * 1.2


class Markov(MockModel):
    """The next word depends on the last one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()  # no experts to count
        vocab = self.config.vocab_size
        self._next = torch.full((vocab, vocab), -30.0)
        self._next[:WORDS, :WORDS] = table(1)

    def __call__(self, batch: Batch, cache: Cache, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        hidden = batch.token_ids[:, None].expand(-1, 8).float()
        return hidden, hidden[:, :0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._next[hidden[:, 0].long()]


class Cousin:
    """Drafts from a distribution like the model's but not the same, with the same noise, as real drafters do."""

    taps: tuple[int, ...] = ()
    observes = False
    max_depth = 2
    costs: Mapping[str, DraftCost] = {}

    def __init__(self, model: Markov) -> None:
        self._next = model._next.clone()
        self._next[:WORDS, :WORDS] += 0.5 * table(2)

    def observe(self, batch: Batch, hidden: Tensor, taps: Tensor, following: Tensor) -> None: ...

    def reset(self, slot: int) -> None: ...

    def flush(self, slot: int) -> None: ...

    def propose(self, requests: Sequence[DraftRequest], go_on: GoOn | None = None) -> list[Draft]:
        guesses: list[list[int]] = [[] for _ in requests]
        confidence: list[list[float]] = [[] for _ in requests]
        for depth in range(max((request.depth for request in requests), default=0)):
            live = [i for i, request in enumerate(requests) if request.depth > depth]
            last = torch.tensor([(guesses[i] or requests[i].output)[-1] for i in live])
            rows = [Row(requests[i].sampling, requests[i].length + depth) for i in live]
            logits = self._next[last]
            for i, word, chances in zip(live, choose(logits, rows).tolist(), logits.softmax(-1), strict=True):
                guesses[i].append(word)
                confidence[i].append(float(chances[word]))
        return [Draft(*both, "cousin") for both in zip(guesses, confidence, strict=True)]


def exact(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Probability of every four words, worked out from the definition of temperature, top-k and top-p."""
    rows = [_filtered((logits / sampling.temperature).softmax(0), sampling) for logits in table(1).double()]
    chances = {}
    for words in product(range(WORDS), repeat=TOKENS):
        chance, last = 1.0, 0  # every prompt ends with word 0
        for word in words:
            chance, last = chance * float(rows[last][word]), word
        if chance > 0:
            chances[words] = chance
    return chances


def _filtered(chances: Tensor, sampling: Sampling) -> Tensor:
    order = chances.argsort(descending=True)
    kept, total = [], 0.0
    for place, word in enumerate(order.tolist()):
        if (sampling.top_k and place >= sampling.top_k) or (total >= sampling.top_p and place):
            break
        kept.append(word)
        total += float(chances[word])
    left = torch.zeros_like(chances)
    left[kept] = chances[kept]
    return left / left.sum()


def sampled(sampling: Sampling) -> tuple[Counter[tuple[int, ...]], Totals]:
    """SAMPLES answers of four words with adaptive depth, each with a seed of its own."""
    model = Markov()
    engine = engine_on(model.decoder, EngineConfig(pages=SLOTS, slots=SLOTS, max_depth=2), Cousin(model))
    for seed in range(SAMPLES):
        engine.submit([3, 0], replace(sampling, seed=seed), AUTO)
    answers: dict[int, list[int]] = {}
    while not engine.idle:
        for event in engine.step():
            answers.setdefault(event.request_id, []).extend(event.tokens)
    return Counter(tuple(answer) for answer in answers.values()), engine.stats().totals


def p_value(found: Mapping[tuple[int, ...], int], chances: Mapping[tuple[int, ...], float]) -> float:
    """Chi-square; rare outcomes are counted together so that every expected count is at least five."""
    total = sum(found.values())
    assert set(found) <= set(chances), "an outcome that has no probability"
    common = {words: chance for words, chance in chances.items() if chance * total >= 5}
    cells = [(found.get(words, 0), chance * total) for words, chance in common.items()]
    rest = total - sum(count for count, _ in cells), total - sum(expected for _, expected in cells)
    if rest[1] >= 5:
        cells.append(rest)
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


@pytest.fixture(autouse=True)
def _bytes_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mock has no weights to count: a step costs much, another token little, so drafting pays."""
    monkeypatch.setattr("stoker.backends.cpu.backend.step_bytes", lambda model: StepBytes(fixed=1e6, token=1e3))


@pytest.mark.parametrize("sampling", SETTINGS, ids=lambda s: f"t{s.temperature}-p{s.top_p}-k{s.top_k}")
def test_tokens_in_a_row_have_the_models_own_distribution(sampling: Sampling) -> None:
    found, totals = sampled(sampling)
    assert sum(found.values()) == SAMPLES
    assert totals.depths[2] > SAMPLES / 4  # blocks of two drafts were verified ...
    assert SAMPLES / 4 < totals.accepted < 0.9 * totals.drafted  # ... and both outcomes are frequent
    assert p_value(found, exact(sampling)) > 0.001


def test_a_chooser_that_favours_drafts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The biased rule: one wrong draft in two is accepted all the same."""
    wrong = 0

    def biased(drafts: Sequence[int], targets: Sequence[int]) -> list[int]:
        nonlocal wrong
        if drafts and drafts[0] != targets[0]:
            wrong += 1
            if wrong % 2:
                return [drafts[0]]
        return accept(drafts, targets)

    monkeypatch.setattr("stoker.engine.outcome.accept", biased)
    found, _ = sampled(SETTINGS[0])
    assert p_value(found, exact(SETTINGS[0])) < 1e-6


def test_the_p_value_is_that_of_chi_square() -> None:
    """Against the closed form for two degrees of freedom: p = exp(-x / 2)."""
    chances: dict[tuple[int, ...], float] = {(0,): 0.5, (1,): 0.3, (2,): 0.2}
    found: dict[tuple[int, ...], int] = {(0,): 480, (1,): 320, (2,): 200}
    statistic = 20**2 / 500 + 20**2 / 300
    assert p_value(found, chances) == pytest.approx(math.exp(-statistic / 2))
