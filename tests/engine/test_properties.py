"""Any mix of requests, cancellations, depths and tight memory: each ends as it would alone, and nothing is left."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from torch import Tensor

from stoker.backends.network.decoder import Decoder
from stoker.engine.engine import EngineConfig
from stoker.engine.event import AUTO, Depth, Event, Finish, TokenLogprob
from stoker.engine.prefix_cache import Stretches
from stoker.sampling.mask import TokenMask
from stoker.sampling.settings import Sampling
from stoker.speculate.drafter import Draft, DraftRequest, GoOn
from tests.engine.drive import DEPTH, PAGES, Oracle, engine_on, run, settings_for

PLAIN, MASKED, STOPPED, FAILING, CONTINUED = range(5)  # variants of a request
VOCAB = 512


class Grammar:
    """After n tokens one of a few; every sixth leaves no choice. `fails_at` tokens it has nothing to say."""

    def __init__(self, fails_at: int = 10**6) -> None:
        self.fails_at = fails_at

    def allowed(self, output: Sequence[int]) -> Tensor | None:
        if len(output) >= self.fails_at:
            raise LookupError("no rule")
        if len(output) % 6 == 1:
            return None
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[self.forced(output)[:1] or [(7 * len(output) + 31 * i) % VOCAB for i in range(9)]] = True
        return mask

    def forced(self, output: Sequence[int]) -> list[int]:
        return [40, 41][len(output) % 6 - 3 :] if len(output) % 6 in (3, 4) else []


@dataclass(frozen=True)
class Kind:
    prompt: int
    variant: int


@dataclass(frozen=True)
class Outcome:
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: Finish | None
    stop: str | None
    error: str | None

    @classmethod
    def of(cls, events: Sequence[Event]) -> "Outcome":
        return cls(
            tuple(token for event in events for token in event.tokens),
            tuple(entry for event in events for entry in event.logprobs),
            events[-1].finish,
            events[-1].stop,
            events[-1].error,
        )

    def starts_with(self, other: "Outcome") -> bool:
        return (
            self.tokens[: len(other.tokens)] == other.tokens and self.logprobs[: len(other.logprobs)] == other.logprobs
        )


class Requests:
    """What each kind of request is, and how it ends alone: one at a time, undrafted, from nothing."""

    def __init__(self, model: Decoder, prompts: list[list[int]], alone: list[list[int]], tokenizer: Tokenizer) -> None:
        self._model, self._prompts, self._alone, self.tokenizer = model, prompts, alone, tokenizer
        self._known: dict[tuple[Kind, Stretches], Outcome] = {}

    def prompt(self, kind: Kind) -> list[int]:
        """A continued one begins with another's prompt and answer, as the next turn of a chat does."""
        prompt = self._prompts[kind.prompt]
        return [*prompt, *self._alone[kind.prompt], 5, 6, 7] if kind.variant == CONTINUED else prompt

    def sampling(self, kind: Kind) -> Sampling:
        plain = settings_for(kind.prompt)
        if kind.variant == STOPPED:
            letters = dict.fromkeys(range(60), 40.0)
            return replace(plain, logit_bias=letters, logprobs=2, stop=("A", "7", "xy", ")"), min_tokens=4)
        return replace(plain, logprobs=1) if kind.variant == MASKED else plain

    def mask(self, kind: Kind) -> TokenMask | None:
        return {MASKED: Grammar(), FAILING: Grammar(fails_at=3 + kind.prompt)}.get(kind.variant)

    def solo(self, kind: Kind, stepped: Stretches = ()) -> Outcome:
        if (kind, stepped) not in self._known:
            engine = engine_on(self._model, EngineConfig(PAGES, 1, max_depth=0), tokenizer=self.tokenizer)
            engine.submit(self.prompt(kind), self.sampling(kind), mask=self.mask(kind))
            engine.scheduler.waiting[0].stepped = stepped
            self._known[kind, stepped] = Outcome.of(run(engine)[0])
        return self._known[kind, stepped]


class Prophet(Oracle):
    """Drafts what a request says alone, wrong now and then."""

    def __init__(self, answer: Callable[[DraftRequest], Sequence[int]], wrong: int) -> None:
        super().__init__({}, wrong)
        self._answer = answer

    def propose(self, requests: Sequence[DraftRequest], go_on: GoOn | None = None) -> list[Draft]:
        for request in requests:
            self.answers[tuple(request.prompt)] = list(self._answer(request))
        return super().propose(requests, go_on)


@pytest.fixture(scope="module")
def requests(
    model: Decoder, prompts: list[list[int]], alone: list[list[int]], checkpoints: dict[str, Path]
) -> Requests:
    tokenizer = Tokenizer.from_file(str(checkpoints["qwen3_5_moe_text"] / "tokenizer.json"))
    return Requests(model, prompts, alone, tokenizer)


KINDS = st.builds(Kind, prompt=st.integers(0, 7), variant=st.integers(PLAIN, CONTINUED))
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), KINDS, st.one_of(st.just(AUTO), st.integers(0, DEPTH))),
        st.tuples(st.just("cancel"), st.integers(0, 7), st.none()),
        st.tuples(st.just("step"), st.integers(1, 4), st.none()),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=ACTIONS,
    wrong=st.integers(1, 5),
    pages=st.integers(4, 12),
    slots=st.integers(1, 4),
    budget=st.sampled_from([64, 128, 512]),
    snapshots=st.integers(0, 4),
)
def test_every_request_ends_as_it_would_alone_and_everything_is_free_in_the_end(
    model: Decoder,
    requests: Requests,
    actions: list[tuple[str, Kind | int, Depth | None]],
    wrong: int,
    pages: int,
    slots: int,
    budget: int,
    snapshots: int,
) -> None:
    kinds: dict[int, Kind] = {}
    by_prompt: dict[tuple[int, ...], Kind] = {}
    config = EngineConfig(
        pages=pages,
        slots=slots,
        max_depth=DEPTH,
        prefill_budget=budget,
        snapshots=snapshots,
        snapshot_interval=64,
    )
    drafter = Prophet(lambda request: requests.solo(by_prompt[tuple(request.prompt)]).tokens, wrong)
    engine = engine_on(model, config, drafter, requests.tokenizer)
    events: dict[int, list[Event]] = {}
    stepped: dict[int, Stretches] = {}

    def take(found: list[Event]) -> None:
        for event in found:
            events.setdefault(event.request_id, []).append(event)
        engine.check_integrity()

    def step() -> None:
        live = list(engine.scheduler)
        take(engine.step())
        stepped.update({sequence.id: sequence.stepped for sequence in live if sequence.stepped is not None})

    for action, what, depth in actions:
        if isinstance(what, Kind) and depth is not None:
            by_prompt[tuple(requests.prompt(what))] = what
            request = engine.submit(
                requests.prompt(what), requests.sampling(what), depth, mask=requests.mask(what), boundaries=[70]
            )
            kinds[request] = what
        elif action == "cancel" and isinstance(what, int):
            event = engine.cancel(what)
            take([event] if event else [])
        elif isinstance(what, int):
            for _ in range(what):
                step()
    while not engine.idle:
        step()
    assert set(events) == set(kinds)
    for request, kind in kinds.items():
        outcome, alone = Outcome.of(events[request]), requests.solo(kind, stepped.get(request, ()))
        stats = events[request][-1].stats
        assert stats is not None
        assert stats.output_tokens == len(outcome.tokens)
        assert stats.accepted == sum(stats.accepted_at) <= sum(stats.drafted_at) == stats.drafted
        if outcome.finish is Finish.CANCELLED:
            assert alone.starts_with(outcome)
        else:
            assert outcome == alone
    while engine.scheduler.prefixes.evict():
        engine.check_integrity()
    assert (engine.scheduler.pages.free, engine.scheduler.slots.free) == (pages, slots)


def test_the_kinds_of_requests_end_in_all_the_ways(requests: Requests) -> None:
    """Else the property would be about less than it says."""
    ends = {variant: [requests.solo(Kind(prompt, variant)) for prompt in range(8)] for variant in range(5)}
    assert all(outcome.finish is Finish.LENGTH for outcome in ends[PLAIN] + ends[MASKED] + ends[CONTINUED])
    assert any(outcome.finish is Finish.STOP for outcome in ends[STOPPED])
    assert all(outcome.error for outcome in ends[FAILING])
    assert all(len(outcome.logprobs) == len(outcome.tokens) for outcome in ends[STOPPED] + ends[MASKED])
