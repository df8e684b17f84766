"""An engine in its own process: loading, asleep, killed, restarted, closed."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.backends.progress import CACHES, DRAFTER, PACKING, READING
from stoker.engine.worker.client import Stream
from stoker.engine.worker.messages import Loading
from stoker.engine.worker.process import EngineProcess
from stoker.engine.worker.spec import EngineSpec
from stoker.errors import ConfigError, EngineError, RequestError
from stoker.sampling.settings import Sampling
from stoker.speculate.choice import DraftChoice
from tests.engine.specs import FATAL, Fragile, NeverReady, Unbuildable
from tests.engine.worker.waiting import CONFIG, LONG, PATIENCE_S, in_time, next_of, tokens_of


def test_loading_is_reported_by_phase_and_percent(engine: EngineProcess, heard: list[Loading]) -> None:
    ready = engine.ready.result(PATIENCE_S)
    assert (ready.pid, ready.config.vocab_size) == (engine.pid, 512)
    phases = {loading.phase: [one.percent for one in heard if one.phase == loading.phase] for loading in heard}
    assert [phase for phase in phases if phase != PACKING] == [READING, DRAFTER, CACHES]
    assert phases[READING][0] is None  # before it is known how much there is
    assert phases[READING][-1] == 100
    assert [phase.name for phase in ready.phases] == ["starting", *phases]
    assert all(phase.seconds >= 0 for phase in ready.phases)
    for shares in phases.values():
        known = [share for share in shares if share is not None]
        assert known == sorted(set(known))
        assert not known or known[-1] == 100


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


def test_only_a_kill_from_outside_is_put_down_to_the_kernel(spec: EngineSpec) -> None:
    with EngineProcess(spec) as engine:
        engine.ready.result(PATIENCE_S)
        engine.kill("it gave no sign of life for 3 s")
        reason = str(engine.exit_error.result(PATIENCE_S))
        assert f"(pid {engine.pid}) was killed by this program: it gave no sign of life for 3 s" in reason
        assert "kernel" not in reason
        engine.restart()
        engine.ready.result(PATIENCE_S)
        os.kill(engine.pid, signal.SIGKILL)
        assert "most often by the kernel, when memory runs out" in str(engine.exit_error.result(PATIENCE_S))


def test_requests_during_a_restart_are_refused_or_served(engine: EngineProcess) -> None:
    """And an end by a signal without a name is noticed like any other."""
    streams: list[Stream] = []
    enough = threading.Event()

    def submit_on_and_on() -> None:
        while not enough.wait(0.001):
            with suppress(EngineError):
                streams.append(engine.submit([70], Sampling(1)))

    os.kill(engine.pid, 40)
    assert "was killed by signal 40" in str(engine.exit_error.result(PATIENCE_S))
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
        patch.setattr("stoker.engine.worker.process.PreparedProcess", no_room)
        with pytest.raises(EngineError, match=r"the engine process could not be started: .*Cannot allocate memory"):
            engine.restart()
    assert not engine.alive
    assert isinstance(engine.ready.exception(0), EngineError)
    assert "Cannot allocate memory" in str(engine.exit_error.result(0))
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
        from stoker.engine.worker.process import EngineProcess
        from stoker.engine.worker.spec import EngineSpec
        from stoker.speculate.choice import DraftChoice
        from stoker.sampling.settings import Sampling

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
