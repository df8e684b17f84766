"""An engine in its own process: requests do not notice where they run, and survive each other's mishaps."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from stoker.engine.client import EngineClient, LocalEngine, Stream
from stoker.engine.engine import Engine, EngineConfig
from stoker.engine.messages import Loading
from stoker.engine.process import EngineProcess
from stoker.engine.request import Event, Finish
from stoker.engine.spec import EngineSpec
from stoker.errors import ConfigError, EngineError, RequestError
from stoker.speculate.choice import DraftChoice
from stoker.speculate.sampling import Sampling
from tests.engine.specs import FATAL, Broken, Fragile, NeverReady, Only, Slow, Unbuildable, Unreadable

PATIENCE_S = 60.0
BYTE_OF_A_STAR = 9  # of the byte tokenizer
CONFIG = EngineConfig(pages=48, slots=6, max_depth=2)
PAUSE = 0.02
LONG = Sampling(max_tokens=1000)  # 20 s and more with that pause: it is still running when something happens to it

T = TypeVar("T")


@pytest.fixture(scope="module")
def spec(checkpoints: dict[str, Path]) -> EngineSpec:
    return EngineSpec(checkpoints["qwen3_5_moe_text"], CONFIG, DraftChoice.parse("mtp:2"))


@pytest.fixture(scope="module")
def heard() -> list[Loading]:
    """What `running` says while it loads."""
    return []


@pytest.fixture(scope="module")
def running(spec: EngineSpec, heard: list[Loading]) -> Iterator[EngineProcess]:
    with EngineProcess(Slow(spec, PAUSE), heard.append) as engine:
        engine.ready.result(PATIENCE_S)
        yield engine


@pytest.fixture
def engine(running: EngineProcess) -> Iterator[EngineProcess]:
    """The one process most tests share; each must leave it without requests."""
    yield running
    assert live(running) == 0


def live(engine: EngineClient) -> int:
    stats = engine.stats().result(PATIENCE_S)
    return stats.running + stats.waiting


def in_time(call: Callable[[], T]) -> T:
    """Fails rather than wait for ever."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(PATIENCE_S)


def next_of(stream: Stream) -> Event:
    return in_time(lambda: next(stream))


def tokens_of(stream: Stream) -> list[int]:
    return in_time(lambda: [token for event in stream for token in event.tokens])


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
    model = spec.build(lambda loading: None).engine.model
    known: dict[str, list[int]] = {}

    def answer(prompt: list[int], sampling: Sampling) -> list[int]:
        key = f"{prompt} {sampling}"
        if key not in known:
            known[key] = compute(prompt, sampling)
        return known[key]

    def compute(prompt: list[int], sampling: Sampling) -> list[int]:
        engine = Engine(model, EngineConfig(pages=20, slots=1, max_depth=0))
        engine.submit(prompt, sampling)
        made: list[int] = []
        while not engine.idle:
            made += [token for event in engine.step() for token in event.tokens]
        return made

    return answer


@pytest.fixture(params=["process", "thread"])
def either(request: pytest.FixtureRequest, spec: EngineSpec) -> Iterator[EngineClient]:
    """What both kinds of engine promise."""
    if request.param == "process":
        yield request.getfixturevalue("engine")
    else:
        with LocalEngine(Slow(spec, PAUSE).build(lambda loading: None).engine) as local:
            yield local


def test_loading_is_reported_by_phase_and_percent(engine: EngineProcess, heard: list[Loading]) -> None:
    ready = engine.ready.result(PATIENCE_S)
    assert (ready.pid, ready.config.vocab_size) == (engine.pid, 512)
    phases = {loading.phase: [one.percent for one in heard if one.phase == loading.phase] for loading in heard}
    assert [phase for phase in phases if phase != "packing"] == ["weights", "drafter", "caches"]
    assert phases["weights"][0] is None  # before it is known how much there is
    assert phases["weights"][-1] == 100
    for shares in phases.values():
        known = [share for share in shares if share is not None]
        assert known == sorted(set(known))
        assert not known or known[-1] == 100


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


def test_a_prompt_larger_than_a_pipe_does_not_make_the_submitter_wait_for_a_step(engine: EngineProcess) -> None:
    """The engine is stopped, and submitting 8 MB still returns."""
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        streams = in_time(lambda: [engine.submit([1] * 1_000_000, Sampling(8)) for _ in range(4)])
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    for stream in streams:
        with pytest.raises(RequestError, match="1,000,008 > context 8,192"):
            next_of(stream)


def test_an_idle_engine_sleeps(engine: EngineProcess) -> None:
    def cpu_ticks() -> int:
        fields = Path(f"/proc/{engine.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])  # user, system

    tokens_of(engine.submit([1], Sampling(2)))
    before = cpu_ticks()
    time.sleep(0.5)
    assert cpu_ticks() - before <= 5  # of 50


def test_control_c_is_left_to_the_parent(engine: EngineProcess) -> None:
    stream = engine.submit([70], Sampling(8))
    next_of(stream)
    os.kill(engine.pid, signal.SIGINT)
    assert len(tokens_of(stream)) == 7


def test_a_killed_engine_fails_its_requests_and_can_be_started_again(engine: EngineProcess) -> None:
    streams = [engine.submit([80 + i], LONG) for i in range(CONFIG.slots + 3)]
    waiting = engine.submit([90], Sampling(8)).follow(lambda event: None)
    first = next_of(streams[0])
    asked = engine.stats
    os.kill(engine.pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(EngineError, match=rf"the engine process \(pid {engine.pid}\) was killed by SIGKILL"):
            tokens_of(stream)
    assert isinstance(waiting.exception(PATIENCE_S), EngineError)
    assert not engine.alive
    for call in (lambda: engine.submit([1], Sampling(8)), asked):
        with pytest.raises(EngineError, match=r"no engine is running: the engine process .* was killed by SIGKILL"):
            call()
    assert not engine.cancel(streams[0].request_id)

    engine.restart()
    with pytest.raises(TimeoutError):  # who gives up waiting spoils nothing
        asyncio.run(wait_for_ready(engine, 0.01))
    again = engine.submit([80], Sampling(8))  # may be submitted while it loads
    assert next_of(again) == replace(first, request_id=again.request_id)
    assert again.request_id > streams[-1].request_id
    asyncio.run(wait_for_ready(engine, PATIENCE_S))
    assert len(tokens_of(again)) == 7


def test_requests_during_a_restart_are_refused_or_served(engine: EngineProcess) -> None:
    """And an end by a signal without a name is noticed like any other."""
    streams: list[Stream] = []
    enough = threading.Event()

    def submit_on_and_on() -> None:
        while not enough.wait(0.001):
            with suppress(EngineError):
                streams.append(engine.submit([70], Sampling(1)))

    os.kill(engine.pid, 40)
    assert "was killed by signal 40" in str(engine.fallen.result(PATIENCE_S))
    thread = threading.Thread(target=submit_on_and_on, daemon=True)
    thread.start()
    engine.restart()
    time.sleep(0.05)
    enough.set()
    thread.join()
    assert streams
    assert [len(tokens_of(stream)) for stream in streams] == [1] * len(streams)


def test_a_restart_that_fails_says_so_and_can_be_tried_again(
    engine: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*arguments: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    running = engine.submit([70], LONG)
    with monkeypatch.context() as patch:
        patch.setattr("stoker.engine.process._Child", no_room)
        with pytest.raises(EngineError, match=r"the engine process could not be started: .*Cannot allocate memory"):
            engine.restart()
    assert not engine.alive
    assert isinstance(engine.ready.exception(0), EngineError)
    assert "Cannot allocate memory" in str(engine.fallen.result(0))
    with pytest.raises(EngineError, match="shut down"):
        tokens_of(running)
    with pytest.raises(EngineError, match="no engine is running: the engine process could not be started"):
        engine.submit([70], Sampling(1))
    engine.restart()
    assert len(tokens_of(engine.submit([70], Sampling(1)))) == 1


async def wait_for_ready(engine: EngineProcess, timeout: float) -> None:
    await asyncio.wait_for(asyncio.wrap_future(engine.ready), timeout)


def test_the_engine_does_not_outlive_its_parent(checkpoints: dict[str, Path]) -> None:
    program = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from stoker.engine.engine import EngineConfig
        from stoker.engine.process import EngineProcess
        from stoker.engine.spec import EngineSpec
        from stoker.speculate.choice import DraftChoice
        from stoker.speculate.sampling import Sampling

        spec = EngineSpec(Path(sys.argv[1]), EngineConfig(), DraftChoice.parse("none"))
        engine = EngineProcess(spec)
        list(engine.submit([1], Sampling(2)))
        print(engine.pid, flush=True)
        time.sleep(600)
        """
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(checkpoints["qwen3_moe"])], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_running(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_step_that_raises_fails_all_with_the_traceback_and_a_restart_helps(spec: EngineSpec) -> None:
    with EngineProcess(Fragile(spec)) as engine:
        streams = [engine.submit([90], LONG), engine.submit([FATAL], LONG), engine.submit([91], LONG)]
        for stream in streams:
            with pytest.raises(
                EngineError, match=r"failed in step \d with ZeroDivisionError: a planted fault"
            ) as caught:
                tokens_of(stream)
            assert "in fragile_step" in caught.value.details
        engine.restart()
        assert len(tokens_of(engine.submit([90], Sampling(8)))) == 8
        # and asked to stop by someone else, it says so rather than vanish
        stream = engine.submit([92], LONG)
        next_of(stream)
        os.kill(engine.pid, signal.SIGTERM)
        with pytest.raises(EngineError, match=rf"\(pid {engine.pid}\) was told to stop by SIGTERM"):
            tokens_of(stream)


def test_closing_drains_or_aborts(spec: EngineSpec) -> None:
    engine = EngineProcess(spec)
    engine.ready.result(PATIENCE_S)
    kept = [engine.submit([100 + i], Sampling(30)) for i in range(CONFIG.slots + 2)]
    engine.close(drain=True, timeout=PATIENCE_S)
    assert [len(tokens_of(stream)) for stream in kept] == [30] * len(kept)
    engine.restart()
    engine.ready.result(PATIENCE_S)
    dropped = engine.submit([100], LONG)
    next_of(dropped)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="the engine was shut down"):
        tokens_of(dropped)
    with pytest.raises(EngineError, match="no engine is running: the engine was shut down"):
        engine.submit([1], Sampling(8))


def test_what_goes_wrong_while_loading_is_said(spec: EngineSpec, tmp_path: Path) -> None:
    heard: list[Loading] = []
    missing = EngineProcess(EngineSpec(tmp_path, CONFIG, DraftChoice.parse("none")))
    unbuildable = EngineProcess(Unbuildable())
    stuck = EngineProcess(NeverReady(), heard.append)
    early = missing.submit([1], Sampling(8))
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        missing.ready.result(PATIENCE_S)
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        next_of(early)
    with pytest.raises(EngineError, match="could not be started: ZeroDivisionError: a planted fault") as caught:
        unbuildable.ready.result(PATIENCE_S)
    assert "specs.py" in caught.value.details
    deadline = time.monotonic() + PATIENCE_S
    while not heard and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [loading.percent for loading in heard] == [25]
    early = stuck.submit([1], Sampling(8))
    stuck.close()  # does not wait for what may take minutes
    with pytest.raises(EngineError, match="shut down"):
        stuck.ready.result(0)
    with pytest.raises(EngineError, match="shut down"):
        next_of(early)


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
