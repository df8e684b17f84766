"""What an engine in its own process and one in a thread promise alike: requests survive each other's mishaps."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
import torch

from stoker.backends.network.load import load_model
from stoker.engine.engine import EngineConfig
from stoker.engine.event import Event, Finish
from stoker.engine.worker.client import EngineClient
from stoker.engine.worker.spec import EngineSpec
from stoker.errors import RequestError
from stoker.sampling.settings import Sampling
from tests.engine.drive import engine_on
from tests.engine.specs import Broken, Only, Unreadable
from tests.engine.worker.waiting import CONFIG, LONG, PATIENCE_S, PAUSE, live, next_of, tokens_of

BYTE_OF_A_STAR = 9  # of the byte tokenizer


def prompts(count: int, longest: int = 90) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(20, 500, (n,), generator=generator).tolist() for n in lengths]


def some_sampling(index: int) -> Sampling:
    tokens = 4 + index % 5
    return Sampling(tokens) if index % 2 else Sampling(tokens, temperature=0.8, top_p=0.9, seed=index)


@pytest.fixture(scope="module")
def alone(spec: EngineSpec) -> Callable[[list[int], Sampling], list[int]]:
    """The answer of an undrafted engine of this process that has nothing else to do."""
    model = load_model(spec.directory).model
    known: dict[str, list[int]] = {}

    def answer(prompt: list[int], sampling: Sampling) -> list[int]:
        key = f"{prompt} {sampling}"
        if key not in known:
            known[key] = compute(prompt, sampling)
        return known[key]

    def compute(prompt: list[int], sampling: Sampling) -> list[int]:
        engine = engine_on(model, EngineConfig(pages=20, slots=1, max_depth=0))
        engine.submit(prompt, sampling)
        made: list[int] = []
        while not engine.idle:
            made += [token for event in engine.step() for token in event.tokens]
        return made

    return answer


def test_fifty_requests_at_a_time_equal_themselves_alone(
    either: EngineClient, alone: Callable[[list[int], Sampling], list[int]]
) -> None:
    asked = [(prompt, some_sampling(index)) for index, prompt in enumerate(prompts(50))]
    streams = [either.submit(prompt, sampling, depth=index % 3) for index, (prompt, sampling) in enumerate(asked)]
    answers = [tokens_of(stream) for stream in streams]
    assert answers == [alone(*request) for request in asked]


def test_streams_are_read_under_asyncio_while_the_event_loop_goes_on(
    either: EngineClient, alone: Callable[[list[int], Sampling], list[int]]
) -> None:
    count = 2 * CONFIG.slots
    started: list[int] = []

    async def read(index: int, prompt: list[int]) -> list[int]:
        made: list[int] = []
        async for event in either.submit(prompt, Sampling(8)):
            if not made:
                started.append(index)
            made += event.tokens
        assert event.finish is Finish.LENGTH
        assert event.stats is not None
        assert (event.stats.prompt_tokens, event.stats.output_tokens, event.stats.steps) == (len(prompt), 8, 7)
        return made

    async def everything() -> tuple[list[list[int]], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking = asyncio.create_task(tick())
        answers = await asyncio.gather(*(read(index, prompt) for index, prompt in enumerate(prompts(count))))
        ticking.cancel()
        stats = await asyncio.wrap_future(either.stats())
        assert stats.running + stats.waiting == 0
        return answers, ticks

    # debug: the event loop then minds calls from other threads
    answers, ticks = asyncio.run(asyncio.wait_for(everything(), PATIENCE_S), debug=True)
    assert answers == [alone(prompt, Sampling(8)) for prompt in prompts(count)]
    assert started == list(range(count))  # first come, first served
    assert ticks > 10


def test_a_task_that_goes_away_frees_its_request(either: EngineClient) -> None:
    """What a server does when its client hangs up."""

    async def handler() -> None:
        with either.submit([1, 2, 3], LONG) as stream:
            async for _ in stream:
                pass

    async def hang_up() -> None:
        task = asyncio.create_task(handler())
        await asyncio.sleep(3 * PAUSE)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(hang_up())
    assert live(either) == 0


def test_a_bad_request_gets_its_sentence_and_nobody_else_notices(
    either: EngineClient, alone: Callable[[list[int], Sampling], list[int]]
) -> None:
    good = either.submit([30, 31, 32], Sampling(8))
    outside = either.submit([600], Sampling(8))
    long = either.submit([1] * 3000, Sampling(100))
    deep = either.submit([1], Sampling(8), depth=5)
    nonsense = either.submit(["one"], Sampling(8))  # type: ignore[list-item]
    with pytest.raises(RequestError, match="token id 600 is outside the vocabulary of 512"):
        next_of(outside)
    with pytest.raises(RequestError, match="3,100 > 3,072 tokens of KV cache"):
        next_of(long)
    with pytest.raises(RequestError, match="depth is 5, expected 0 to 2"):
        next_of(deep)
    with pytest.raises(RequestError, match="token id 'one' is not a whole number"):
        next_of(nonsense)
    assert tokens_of(outside) == []  # a stream ends once
    assert tokens_of(good) == alone([30, 31, 32], Sampling(8))


def test_cancelling_takes_effect_within_a_step_wherever_the_request_is(either: EngineClient) -> None:
    streams = [either.submit([40 + i], LONG) for i in range(CONFIG.slots + 30)]  # the last thirty have to queue
    next_of(streams[0])
    before = either.stats().result(PATIENCE_S).totals.steps
    for stream in streams:
        stream.cancel()
    for stream in streams:
        assert list(stream)[-1].finish is Finish.CANCELLED
    assert live(either) == 0
    after = either.stats().result(PATIENCE_S).totals.steps
    assert after - before <= 10  # two if this thread is not held up meanwhile; never one for each of them
    assert not either.cancel(streams[0].request_id)
    with pytest.raises(RequestError, match="there is no request 12345 to cancel; this engine has had ids 0 to"):
        either.cancel(12345)


def test_a_callback_that_raises_fails_its_own_request_alone(
    either: EngineClient, alone: Callable[[list[int], Sampling], list[int]]
) -> None:
    seen: list[int] = []

    def fussy(event: Event) -> None:
        raise ZeroDivisionError("a planted fault")

    bad = either.submit([50], LONG).follow(fussy)
    good = either.submit([51], Sampling(8)).follow(lambda event: seen.extend(event.tokens))
    assert good.result(PATIENCE_S).finish is Finish.LENGTH
    assert seen == alone([51], Sampling(8))
    assert isinstance(bad.exception(PATIENCE_S), ZeroDivisionError)
    deadline = time.monotonic() + PATIENCE_S
    while live(either) and time.monotonic() < deadline:
        time.sleep(PAUSE)
    assert live(either) == 0


def test_readers_that_are_slow_or_never_come_hold_up_nobody(either: EngineClient) -> None:
    blocked = threading.Event()
    stuck = either.submit([60], Sampling(20)).follow(lambda event: blocked.wait())
    unread = either.submit([61], Sampling(20))
    assert len(tokens_of(either.submit([62], Sampling(20)))) == 20
    assert not stuck.done()
    blocked.set()
    assert stuck.result(PATIENCE_S).finish is Finish.LENGTH
    assert len(tokens_of(unread)) == 20  # its events waited for it


def test_a_mask_is_built_where_the_engine_runs_and_stop_strings_work_there(either: EngineClient) -> None:
    assert set(tokens_of(either.submit([1], Sampling(8), depth=2, mask=Only((7, 8))))) <= {7, 8}
    stopped = list(either.submit([1], Sampling(8, stop=("*",)), mask=Only((BYTE_OF_A_STAR,))))
    assert (stopped[-1].finish, stopped[-1].stop, len(stopped)) == (Finish.STOP, "*", 1)


def test_a_mask_that_fails_fails_its_own_request(either: EngineClient) -> None:
    with pytest.raises(RequestError, match=r"the request cannot be sent to the engine: .* not a closure"):
        either.submit([1], Sampling(8), mask=lambda: Only((1,))())
    broken, barren, late = (either.submit([1], Sampling(8), mask=mask) for mask in (Broken(), Only(()), Only((7,), 3)))
    good = either.submit([1], Sampling(8))
    with pytest.raises(RequestError, match="the request cannot be queued: ZeroDivisionError: a planted fault"):
        tokens_of(broken)
    with pytest.raises(RequestError, match="the token mask allows no token after 0 output tokens"):
        tokens_of(barren)
    assert [next_of(late).tokens for _ in range(3)] == [(7,)] * 3
    with pytest.raises(RequestError, match="the token mask failed after 3 output tokens: ZeroDivisionError"):
        next_of(late)
    assert len(tokens_of(good)) == 8


def test_what_is_no_exception_fails_its_own_request_too(either: EngineClient) -> None:
    """As a panic in a library written in Rust is none."""
    late, good = (either.submit([1], Sampling(8), mask=mask) for mask in (Only((7,), 2, SystemExit), None))
    with pytest.raises(RequestError, match="the token mask failed after 2 output tokens: SystemExit: a planted fault"):
        tokens_of(late)
    assert len(tokens_of(good)) == 8


def test_a_request_that_cannot_be_read_fails_alone(either: EngineClient) -> None:
    bad, good = either.submit([1, Unreadable(2)], Sampling(8)), either.submit([1], Sampling(8))
    with pytest.raises(RequestError, match="the request cannot be queued: ZeroDivisionError: a planted fault"):
        tokens_of(bad)
    assert len(tokens_of(good)) == 8
