"""Requests do not notice each other, drafting, or being pushed out: each equals itself alone and undrafted."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stoker.demo.random_checkpoint import (
    small_config,
    small_drafter_config,
    write_random_checkpoint,
    write_random_drafter,
)
from stoker.engine.engine import Engine, EngineConfig
from stoker.engine.request import Finish
from stoker.errors import RequestError
from stoker.model.batch import Batch
from stoker.model.decoder import Decoder
from stoker.model.load import load_drafter, load_model
from stoker.speculate.dflash import DFlashDrafter
from stoker.speculate.drafter import Drafter, DraftRequest
from stoker.speculate.lookup import LookupDrafter
from stoker.speculate.mtp import MtpDrafter
from stoker.speculate.sampling import Sampling

PAGES, SLOTS, DEPTH = 24, 4, 6


class Oracle:
    """Knows the right continuation and spoils every `wrong`-th guess, so that blocks are accepted in part."""

    taps: tuple[int, ...] = ()
    max_depth = DEPTH

    def __init__(self, answers: dict[tuple[int, ...], list[int]], wrong: int) -> None:
        self.answers, self.wrong, self.asked = answers, wrong, 0

    def observe(self, batch: Batch, hidden: Tensor, taps: Tensor, following: Tensor) -> None: ...

    def reset(self, slot: int) -> None: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        drafts = []
        for request in requests:
            answer = self.answers[tuple(request.prompt)][len(request.output) :][: request.depth]
            for place in range(len(answer)):
                self.asked += 1
                if self.asked % self.wrong == 0:
                    answer[place] = (answer[place] + 1) % 512
            drafts.append(answer)
        return drafts


@pytest.fixture(scope="module")
def model(checkpoints: dict[str, Path]) -> Decoder:
    return load_model(checkpoints["qwen3_5_moe_text"]).model


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = (60, 125, 50, 1, 63, 200, 64, 90)  # most grow into another page while they decode
    return [torch.randint(0, 512, (n,), generator=generator).tolist() for n in lengths]


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


@pytest.fixture(scope="module")
def alone(model: Decoder, prompts: list[list[int]]) -> list[list[int]]:
    """Each request by itself, one token a step."""
    answers = []
    for index, prompt in enumerate(prompts):
        engine = Engine(model, EngineConfig(pages=PAGES, slots=1, max_depth=0))
        engine.submit(prompt, settings_for(index))
        answers.append(drain(engine)[0])
    return answers


def drain(engine: Engine, limit: int = 2000) -> dict[int, list[int]]:
    """Runs to the end, checking the books after every step. -> tokens by request."""
    tokens: dict[int, list[int]] = {}
    for _ in range(limit):
        if engine.idle:
            return tokens
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.tokens)
        engine.check_integrity()
    raise AssertionError("the engine did not come to an end")


def drafter_of(name: str, model: Decoder, prompts: list[list[int]], alone: list[list[int]], tmp_path: Path) -> Drafter:
    if name == "mtp":
        return MtpDrafter(model, PAGES, SLOTS, DEPTH)
    if name == "lookup":
        return LookupDrafter(DEPTH)
    if name == "dflash":
        write_random_drafter(tmp_path, small_drafter_config(small_config()))
        return DFlashDrafter(model, load_drafter(tmp_path, model.config), PAGES, DEPTH)
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, alone, strict=True)}
    return Oracle(answers, wrong=int(name.removeprefix("oracle-")))


@pytest.mark.parametrize("name", ["mtp", "dflash", "lookup", "oracle-3", "oracle-1000000"])
@pytest.mark.parametrize("pages", [PAGES, 4])
def test_every_request_equals_itself_alone_and_undrafted(
    model: Decoder, prompts: list[list[int]], alone: list[list[int]], tmp_path: Path, name: str, pages: int
) -> None:
    """All drafters, mixed depths (0 too), 8 requests on 4 slots; 4 pages force preemption."""
    drafter = drafter_of(name, model, prompts, alone, tmp_path)
    config = EngineConfig(
        pages=pages, slots=SLOTS, max_depth=DEPTH, prefill_budget=128, checkpoints=3, checkpoint_interval=64
    )
    engine = Engine(model, config, drafter)
    for index, prompt in enumerate(prompts):
        engine.submit(prompt, settings_for(index), depth=[DEPTH, 2, 0, 5][index // 2])
    sequences = list(engine._waiting)
    tokens = drain(engine)
    assert [tokens[index] for index in range(len(prompts))] == alone
    assert engine._pages.free == pages - len(set(engine._prefixes.pinned()))
    assert engine._slots.free == SLOTS
    if pages == 4:
        assert sum(sequence.stats.preemptions for sequence in sequences) > 0
    if name == "oracle-1000000":
        drafted = [sequence for sequence in sequences if sequence.depth]
        assert all(sequence.stats.accepted == sequence.stats.drafted > 0 for sequence in drafted)
        assert drafted[0].stats.steps <= -(-19 // (DEPTH + 1))


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_moe"])
def test_the_other_families_too(checkpoints: dict[str, Path], prompts: list[list[int]], family: str) -> None:
    model = load_model(checkpoints[family]).model
    plain, drafted = (
        Engine(model, EngineConfig(pages=PAGES, slots=slots, max_depth=DEPTH), LookupDrafter(DEPTH)) for slots in (1, 4)
    )
    for prompt in prompts[:4]:
        plain.submit(prompt * 2, Sampling(max_tokens=16))
        drafted.submit(prompt * 2, Sampling(max_tokens=16), depth=DEPTH)
    assert drain(drafted) == drain(plain)


def test_mtp_rows_written_while_drafting_leave_no_trace(model: Decoder, prompts: list[list[int]]) -> None:
    """After random accepts the head's KV equals that of depth-0 steps over the same text."""
    pages = {}
    for depth in (0, DEPTH):
        drafter = MtpDrafter(model, PAGES, 1, DEPTH)
        engine = Engine(model, EngineConfig(pages=PAGES, slots=1, max_depth=DEPTH), drafter)
        engine.submit(prompts[2], Sampling(max_tokens=30), depth=depth)
        owned: list[int] = []
        while not engine.idle:
            owned = engine._running[0].pages if engine._running else owned
            engine.step()
        written = len(prompts[2]) + 28  # every token but the last has a row
        kv = drafter._pages
        pages[depth] = [tensor[owned].flatten(0, 1)[:written] for tensor in (kv.keys, kv.values)]
    assert all(torch.equal(a, b) for a, b in zip(pages[0], pages[DEPTH], strict=True))


def test_a_stop_inside_an_accepted_block_cuts_the_block(model: Decoder, prompts: list[list[int]]) -> None:
    engine = Engine(model, EngineConfig(pages=PAGES, slots=1, max_depth=0))
    engine.submit(prompts[0], Sampling(max_tokens=20))
    free = drain(engine)[0]
    stop = next(token for token in free[3:] if free.index(token) >= 3)
    want = free[: free.index(stop) + 1]
    drafter = Oracle({tuple(prompts[0]): free}, wrong=10**6)
    engine = Engine(model, EngineConfig(pages=PAGES, slots=1, max_depth=DEPTH), drafter)
    engine.submit(prompts[0], Sampling(max_tokens=20, stop_ids=(stop,)), depth=DEPTH)
    events = []
    while not engine.idle:
        events += engine.step()
    assert [token for event in events for token in event.tokens] == want
    assert events[-1].finish is Finish.STOP


def test_cancelling_frees_everything_within_a_step(model: Decoder, prompts: list[list[int]]) -> None:
    engine = Engine(model, EngineConfig(pages=PAGES, slots=2, max_depth=0))
    ids = [engine.submit(prompt, Sampling(max_tokens=50)) for prompt in prompts[:4]]
    engine.step()
    for request_id in ids:
        event = engine.cancel(request_id)
        assert event is not None
        assert event.finish is Finish.CANCELLED
        engine.check_integrity()
    assert engine.idle
    assert (engine._pages.free, engine._slots.free) == (PAGES, 2)
    assert engine.cancel(ids[0]) is None


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 7), st.integers(0, DEPTH)),
        st.tuples(st.just("cancel"), st.integers(0, 7), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=ACTIONS,
    wrong=st.integers(1, 5),
    pages=st.integers(4, 12),
    slots=st.integers(1, 4),
    budget=st.sampled_from([64, 128, 512]),
    checkpoints=st.integers(0, 3),
)
def test_any_mix_of_requests_cancellations_and_tight_memory(
    model: Decoder,
    prompts: list[list[int]],
    alone: list[list[int]],
    actions: list[tuple[str, int, int]],
    wrong: int,
    pages: int,
    slots: int,
    budget: int,
    checkpoints: int,
) -> None:
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, alone, strict=True)}
    config = EngineConfig(
        pages=pages,
        slots=slots,
        max_depth=DEPTH,
        prefill_budget=budget,
        checkpoints=checkpoints,
        checkpoint_interval=64,
    )
    engine = Engine(model, config, Oracle(answers, wrong))
    submitted: list[int] = []  # index into prompts, by request id
    cancelled: set[int] = set()
    tokens: dict[int, list[int]] = {}

    def step() -> None:
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.tokens)
        engine.check_integrity()

    for action, number, depth in actions:
        if action == "submit":
            engine.submit(prompts[number], settings_for(number), depth)
            submitted.append(number)
        elif action == "cancel" and engine.cancel(number):
            cancelled.add(number)
        elif action == "step":
            for _ in range(number):
                step()
    while not engine.idle:
        step()
    for request_id, index in enumerate(submitted):
        made = tokens.get(request_id, [])
        assert made == (alone[index][: len(made)] if request_id in cancelled else alone[index])
    while engine._prefixes.evict():
        engine.check_integrity()
    assert (engine._pages.free, engine._slots.free) == (pages, slots)


def test_what_can_never_be_served_is_refused_with_numbers(model: Decoder) -> None:
    engine = Engine(model, EngineConfig(pages=2, slots=1, max_depth=2))
    with pytest.raises(RequestError, match=r"100 tokens and max_tokens asks 29: 129 > 128 tokens of KV cache"):
        engine.submit([1] * 100, Sampling(max_tokens=29))
    with pytest.raises(RequestError, match="depth is 3, expected 0 to 2"):
        engine.submit([1], Sampling(), depth=3)
    with pytest.raises(RequestError, match="depth is 1, but this engine has no drafter"):
        engine.submit([1], Sampling(), depth=1)
    with pytest.raises(RequestError, match="token id 600 is outside the vocabulary of 512"):
        engine.submit([1], Sampling(logit_bias={600: 1.0}))
    with pytest.raises(RequestError, match="prefill_budget is 100, expected a multiple of 64"):
        EngineConfig(prefill_budget=100)
    assert engine.idle


def test_a_head_that_is_missing_is_said(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, small_config(mtp_num_hidden_layers=0))
    with pytest.raises(ValueError, match="no MTP head"):
        MtpDrafter(load_model(tmp_path).model, 1, 1, 1)
