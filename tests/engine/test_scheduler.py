"""Who runs when: first come, first served, prompts beside decoding, nobody starved, memory by the page."""

from typing import Any

import pytest

from stoker.engine.engine import Engine, EngineConfig
from stoker.engine.event import Event, Finish
from stoker.engine.pages import Pool
from stoker.engine.scheduler import FIRST_CHUNK, PAUSE_ALONE, Pace
from stoker.engine.step import MAX_ROWS
from stoker.sampling.settings import Sampling
from tests.engine.drive import engine_on, run
from tests.engine.mock import MockDrafter, MockModel, answer


def new_engine(drafts: int = 0, model: MockModel | None = None, **options: Any) -> Engine:
    config = EngineConfig(**({"pages": 64, "slots": 4, "max_depth": max(1, drafts)} | options))
    return engine_on((model or MockModel()).decoder, config, MockDrafter(drafts, wrong=5) if drafts else None)


def step(engine: Engine) -> dict[int, Event]:
    events = engine.step()
    engine.check_integrity()
    assert len({event.request_id for event in events}) == len(events)  # one event per request and step
    return {event.request_id: event for event in events}


def test_decoding_goes_on_while_a_long_prompt_is_read_in_chunks() -> None:
    engine = new_engine(prefill_budget=64)
    first = engine.submit([1] * 10, Sampling(max_tokens=60))
    step(engine)
    second = engine.submit([2] * 1000, Sampling(max_tokens=5))
    steps = 0
    while second not in (events := step(engine)):
        assert len(events[first].tokens) == 1
        steps += 1
    assert steps == 1000 // 64


@pytest.mark.parametrize("fixed", [0.0, 0.02, 0.3])
def test_a_step_takes_as_many_prompt_tokens_as_answers_may_wait_for(fixed: float) -> None:
    """A card that takes `fixed` seconds to read its weights and 20,000 tokens a second."""

    def seconds(tokens: int) -> float:
        return fixed + tokens / 20_000

    pace = Pace(8192, pause_s=0.25)
    assert pace.budget(answers=True) == FIRST_CHUNK
    for tokens in (512, 8192, 512, 4096):
        pace.took(tokens, seconds(tokens))
    for _ in range(20):
        tokens = pace.budget(answers=True)
        assert tokens % 64 == 0
        pace.took(tokens, seconds(tokens))
    longest = max(0.25, 2 * fixed)  # half of the time goes into tokens, whatever it takes to read the weights
    assert longest * 0.9 < seconds(tokens) <= longest * 1.01
    assert pace.budget(answers=False) == min(8192, int(20_000 * (PAUSE_ALONE * 0.25 - fixed)) // 64 * 64)


def test_short_prompts_do_not_make_long_ones_look_slow() -> None:
    pace = Pace(8192, pause_s=0.25)
    pace.took(8192, 0.45)
    for _ in range(50):
        pace.took(100, 0.04)
    assert pace.budget(answers=True) > 2048


def test_prompts_wait_for_nobody_where_no_pause_is_set() -> None:
    engine = new_engine(prefill_budget=1024)
    engine.submit([1] * 10, Sampling(max_tokens=60))
    step(engine)
    second = engine.submit([2] * 1000, Sampling(max_tokens=5))
    assert second in step(engine)


def test_the_budget_is_shared_in_the_order_of_arrival() -> None:
    engine = new_engine(prefill_budget=128)
    requests = [engine.submit([index] * 100, Sampling(max_tokens=3)) for index in range(3)]
    firsts = []
    while not engine.idle:
        firsts += [request for request, event in step(engine).items() if request not in firsts and event.tokens]
    assert firsts == requests


def test_the_head_of_the_queue_is_not_overtaken_by_smaller_requests() -> None:
    engine = new_engine(pages=4)
    running = engine.submit([1] * 150, Sampling(max_tokens=30))
    step(engine)
    large = engine.submit([2] * 140, Sampling(max_tokens=4))  # 3 pages, one is free
    small = [engine.submit([3] * 5, Sampling(max_tokens=4)) for _ in range(3)]
    order = []
    while not engine.idle:
        order += [request for request, event in step(engine).items() if event.finish]
    assert order[:2] == [running, large]
    assert set(order[2:]) == set(small)


def test_snapshots_are_not_dropped_for_a_request_that_would_not_fit_anyway() -> None:
    engine = new_engine(pages=6, slots=2, snapshots=4)
    engine.submit([9] * 130, Sampling(max_tokens=2))
    run(engine)
    kept = len(engine.scheduler.prefixes)
    assert kept > 0  # two pages are pinned
    engine.submit([1] * 120, Sampling(max_tokens=40))
    step(engine)
    engine.submit([2] * 330, Sampling(max_tokens=10))  # six pages: more than there are beside the first
    for _ in range(5):
        step(engine)
    assert len(engine.scheduler.waiting) == 1
    assert len(engine.scheduler.prefixes) >= kept
    run(engine)
    assert engine.stats().totals.finished["length"] == 3


def test_nobody_starves_when_all_grow_beyond_memory() -> None:
    """Six requests that would each fill the memory alone: they push each other out, and all come to their end."""
    engine = new_engine(drafts=3, pages=5, slots=4)
    prompts = [[index] * (40 + index) for index in range(6)]
    for prompt in prompts:
        engine.submit(prompt, Sampling(max_tokens=250), 3)
    events = run(engine, limit=5000)
    for request, prompt in enumerate(prompts):
        assert [token for event in events[request] for token in event.tokens] == answer(prompt, 250)
    assert engine.stats().preemptions > 0
    ends = [events[request][-1].stats for request in range(6)]
    assert sum(stats.preemptions for stats in ends if stats) == engine.stats().preemptions


def test_what_a_preempted_request_finds_of_its_own_was_not_cached_before() -> None:
    engine = new_engine(pages=8, slots=2, snapshots=4)
    engine.submit([1] * 100, Sampling(max_tokens=200))
    engine.submit([2] * 200, Sampling(max_tokens=100))
    ends = [events[-1].stats for events in run(engine).values()]
    assert sum(stats.preemptions for stats in ends if stats) > 0
    assert [stats.cached_tokens for stats in ends if stats] == [0, 0]


def test_making_room_looks_at_each_snapshot_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pages each of them holds: those of one long text hold nearly the same."""
    engine = new_engine(pages=64, slots=1, snapshots=12, snapshot_interval=256)
    engine.submit([5] * 3000, Sampling(max_tokens=2))
    run(engine)
    kept, looks = len(engine.scheduler.prefixes), 0
    look = Pool.pinned_alone

    def counted(self: Pool, number: int) -> bool:
        nonlocal looks
        looks += 1
        return look(self, number)

    monkeypatch.setattr(Pool, "pinned_alone", counted)
    assert kept > 8
    assert engine.scheduler.prefixes.evict()
    assert 0 < looks <= kept


def test_a_step_of_more_rows_than_a_forward_may_have_is_split() -> None:
    model = MockModel()
    engine = new_engine(drafts=15, model=model, pages=64, slots=20)
    prompts = [[index] * 30 for index in range(20)]
    for prompt in prompts:
        engine.submit(prompt, Sampling(max_tokens=40), 15)
    events = run(engine)
    assert model.most_rows <= MAX_ROWS < 20 * 16
    assert model.step_rows == engine.stats().totals.step_tokens
    for request, prompt in enumerate(prompts):
        assert [token for event in events[request] for token in event.tokens] == answer(prompt, 40)


def test_a_cancelled_request_is_gone_within_the_step_wherever_it_stands() -> None:
    engine = new_engine(drafts=3, prefill_budget=64, slots=2)
    decoding = engine.submit([1] * 10, Sampling(max_tokens=50), 3)
    reading = engine.submit([2] * 500, Sampling(max_tokens=50), 3)
    waiting = engine.submit([3] * 10, Sampling(max_tokens=50), 3)
    for _ in range(3):
        step(engine)
    for request in (waiting, reading, decoding):
        event = engine.cancel(request)
        assert event is not None
        assert event.finish is Finish.CANCELLED
        assert event.stats is not None
        assert request not in step(engine)
    assert engine.idle
    assert engine.stats().pages_used == engine.stats().slots_used == 0


def test_a_request_is_told_what_it_cost_and_the_engine_adds_up() -> None:
    engine = new_engine(drafts=4, snapshots=4)
    prompt = list(range(100))
    engine.submit(prompt, Sampling(max_tokens=21), 4)
    first = run(engine)[0][-1].stats
    engine.submit([*prompt, *answer(prompt, 21), 7], Sampling(max_tokens=6), 2)
    second = run(engine)[1][-1].stats
    assert first is not None
    assert second is not None
    assert (first.prompt_tokens, first.cached_tokens, first.prefill_tokens, first.output_tokens) == (100, 0, 100, 21)
    assert (second.prompt_tokens, second.cached_tokens, second.prefill_tokens) == (122, 64, 58)
    # the drafter is wrong at every fifth position: the token after 99 comes from prefill, 100 to 104 from a step ...
    assert first.steps == sum(first.depths.values())
    assert first.drafted == sum(first.drafted_at)
    assert first.accepted == sum(first.accepted_at) == first.output_tokens - 1 - first.steps
    assert first.queue_s >= 0.0
    assert first.prefill_s > 0.0
    assert first.decode_s > 0.0
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used, stats.slots_used) == (0, 0, 1, 0)
    assert (stats.snapshots, stats.pages, stats.slots) == (1, 64, 4)
    totals = stats.totals
    assert totals.steps == first.steps + second.steps
    assert totals.step_tokens == first.drafted + second.drafted + totals.steps
    assert (totals.prefill_tokens, totals.cached_tokens, totals.output_tokens) == (158, 64, 27)
    assert totals.finished == {"stop": 0, "length": 2, "cancelled": 0, "error": 0}
    assert stats.cache_bytes > 0
    assert engine.stats().totals is not totals  # a copy, not a window
