"""Drafts accepted unseen: as many as were asked for, in a state that holds what was emitted, and not with a grammar."""

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from stoker.backends.cpu.build import cpu_backend
from stoker.backends.network.load import Loaded, load_model
from stoker.demo import EMBEDDED
from stoker.engine.engine import Engine, EngineConfig
from stoker.engine.event import Event
from stoker.sampling.settings import Sampling
from stoker.speculate.choice import DraftChoice
from tests.engine.drive import run

LENGTH = 240


class Even:
    """A mask that lets every other token pass."""

    def __init__(self, vocab_size: int) -> None:
        self._allowed = torch.arange(vocab_size) % 2 == 0

    def allowed(self, output: Sequence[int]) -> Tensor:
        return self._allowed

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        return ()


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_model(EMBEDDED)


def engine_of(loaded: Loaded, draft: str, assumed: float | None) -> Engine:
    choice = DraftChoice.parse(draft)
    config = EngineConfig(pages=16, slots=3, max_depth=choice.depth, assumed_tokens=assumed)
    backend, drafter = cpu_backend(loaded.model, config, choice, EMBEDDED)
    return Engine(config, backend, drafter)


def ask(engine: Engine, depth: int, count: int = 1) -> dict[int, list[Event]]:
    for seed in range(count):
        engine.submit([5, 17, 30 + seed], Sampling(max_tokens=LENGTH), depth=depth)
    return run(engine)


@pytest.mark.parametrize(("draft", "tokens"), [("mtp:2", 2.6), ("dflash:4", 3.3)])
def test_steps_emit_the_mean_that_was_asked_for(loaded: Loaded, draft: str, tokens: float) -> None:
    depth = DraftChoice.parse(draft).depth
    found = ask(engine_of(loaded, draft, tokens), depth, count=3)
    for events in found.values():
        stats = events[-1].stats
        assert stats is not None
        assert stats.output_tokens == LENGTH
        assert (stats.output_tokens - 1) / stats.steps == pytest.approx(tokens, rel=0.01)
        assert stats.accepted / stats.steps == pytest.approx(tokens - 1, rel=0.02)
        assert stats.assumed_tokens == tokens
        for event in (event for event in events[1:] if event.drafts):  # the last token may have none before it
            assert event.assumed is not None
            assert event.tokens[: event.assumed] == event.drafts[: event.assumed], "the drafts, as they are"


def test_it_is_off_unless_asked_for(loaded: Loaded) -> None:
    (drafted,) = ask(engine_of(loaded, "mtp:2", None), 2).values()
    (plain,) = ask(engine_of(loaded, "none", None), 0).values()
    assert all(event.assumed is None for event in drafted)
    assert drafted[-1].stats is not None
    assert drafted[-1].stats.assumed_tokens is None
    assert _tokens(drafted) == _tokens(plain)


def test_the_state_is_that_of_the_tokens_that_were_emitted(loaded: Loaded) -> None:
    """A step ends with the model's own choice after the drafts before it, whether or not those were right."""
    (events,) = ask(engine_of(loaded, "mtp:2", 2.6), 2).values()
    tokens, ends = _tokens(events), list(accumulate(len(event.tokens) for event in events))
    agreed = 0
    for end in ends[20:80:6]:
        plain = engine_of(loaded, "none", None)
        plain.submit([5, 17, 30, *tokens[: end - 1]], Sampling(max_tokens=1))
        (again,) = run(plain).values()
        agreed += again[0].tokens == (tokens[end - 1],)
    assert agreed >= 9, "of 10; a prompt rounds otherwise than steps"


def test_what_a_grammar_allows_is_looked_at(loaded: Loaded) -> None:
    engine = engine_of(loaded, "mtp:2", 2.9)
    engine.submit([5, 17, 30], Sampling(max_tokens=40), depth=2, mask=Even(loaded.config.vocab_size))
    (events,) = run(engine).values()
    assert len(_tokens(events)) == 40
    assert all(token % 2 == 0 for token in _tokens(events))
    assert all(event.assumed is None for event in events)
    assert events[-1].stats is not None
    assert events[-1].stats.assumed_tokens == 2.9, "what is reported of it says so all the same"


def _tokens(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]
