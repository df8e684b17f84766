"""The memory plan refuses what does not fit, with the numbers; the guard gives up a little before it gives up all."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest

from stoker.backends.family import PAGE_SIZE
from stoker.demo import EMBEDDED
from stoker.errors import CheckpointError, RequestError
from stoker.server.config import ServerConfig
from stoker.server.lifecycle.memory_guard import (
    PROC,
    MemoryGuard,
    Reading,
    _group_folders,
    read_memory,
)
from stoker.server.lifecycle.plan import RUNTIME, Plan, plan_engine
from stoker.speculate.choice import DraftChoice
from tests.server.faulty import SLOW
from tests.server.running import PATIENCE_S, Running, chat_body
from tests.support.random_checkpoint import small_config, write_random_checkpoint

GIB = 1 << 30
PLENTY = Reading(20 * GIB, 24 * GIB)


def config(**given: object) -> ServerConfig:
    return ServerConfig(EMBEDDED, ("demo",), **given)  # type: ignore[arg-type]


def meminfo(file: Path, available: float, total: float = 16.0) -> None:
    """GiB."""
    kib = {"MemTotal": int(total * (1 << 20)), "MemFree": 0, "MemAvailable": int(available * (1 << 20))}
    kib |= dict.fromkeys(("Buffers", "Cached", "Shmem", "Active", "Inactive", "Slab"), 0)
    lines = "".join(f"{name}: {count} kB\n" for name, count in kib.items())
    file.with_suffix(".new").write_text(lines)
    file.with_suffix(".new").rename(file)


def test_the_plan_follows_what_was_asked_for() -> None:
    plan = plan_engine(config(users=3, context=1000), PLENTY)
    assert plan.context == 1000
    assert (plan.engine.pages, plan.engine.slots) == (3 * 16, 3)
    assert plan.reserve == int(24 * GIB * 0.08)
    assert plan.total == sum(item.bytes for item in plan.items)
    halved = plan_engine(config(users=3, context=1000, kv_dtype="fp8"), PLENTY)
    assert halved.kv_bytes < plan.kv_bytes
    assert plan_engine(config(prefix_cache=0), PLENTY).engine.snapshots == 0


def test_without_recurrent_state_a_prefix_cache_is_counted_in_pages(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, small_config("qwen3_moe"))
    plan = plan_engine(ServerConfig(tmp_path, ("small",), prefix_cache=1 << 20), PLENTY)
    page = plan.kv_bytes // plan.engine.pages
    assert plan.engine.snapshots == (1 << 20) // page


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_mtp_head_that_is_only_announced_is_not_planned(tmp_path: Path, device: str) -> None:
    if device == "cuda":
        pytest.importorskip("triton")
    sizes: dict[str, Any] = {
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    }  # which GPU kernels can pack
    whole, bare = tmp_path / "whole", tmp_path / "bare"
    write_random_checkpoint(whole, small_config(**sizes))
    write_random_checkpoint(bare, small_config(mtp_num_hidden_layers=0, **sizes))
    shutil.copy(whole / "config.json", bare)

    def planned(draft: str, directory: Path = bare) -> Plan:
        return plan_engine(ServerConfig(directory, ("small",), draft=draft, device=device), PLENTY)

    def names(plan: Plan) -> list[str]:
        return [item.name for item in plan.items]

    plan = planned("auto")
    assert plan == planned("lookup:auto")
    assert plan.engine.max_depth == 16, "lookup's"
    assert "KV cache: MTP" not in names(plan)
    assert "KV cache: MTP" in names(planned("auto", whole))
    with pytest.raises(CheckpointError, match="has no MTP head"):
        planned("mtp:2")


def test_less_memory_means_fewer_pages_and_then_no_start() -> None:
    def pages(available: int) -> int:
        return plan_engine(config(users=8, reserve=0), Reading(available, 2 * GIB)).engine.pages

    assert pages(2 * GIB) == 1024
    assert 128 <= pages(GIB) < 1024, "fewer requests of full length fit at a time"
    with pytest.raises(RequestError) as refused:
        pages(800 << 20)
    found = str(refused.value)
    for words in ("one request of 8,192 tokens does not fit", "weights 46", "800.0 MiB available", "--context"):
        assert words in found
    with pytest.raises(RequestError, match="stay free for the system"):
        plan_engine(config(reserve=20 * GIB), PLENTY)
    with pytest.raises(RequestError, match="does not fit"):
        plan_engine(config(memory=100 << 20), PLENTY)
    with pytest.raises(RequestError, match="made for 8,192"):
        plan_engine(config(context=100_000), PLENTY)


@pytest.mark.parametrize("draft", ["none", "auto"])
def test_on_a_gpu_the_plan_has_everything_that_is_allocated_there(draft: str) -> None:
    pytest.importorskip("triton")
    from stoker.backends.gpu.measure import measure

    asked = config(users=8, reserve=0, device="cuda", draft=draft, prefix_cache=32 << 20)
    plan = plan_engine(asked, PLENTY)
    names = " ".join(item.name for item in plan.items)
    for words in ("buffers of steps", "buffers of prompts, 8,192 tokens", "graphs, sampling (assumed)"):
        assert words in names
    assert ("buffers of drafting" in names) == (draft != "none")
    found = measure(EMBEDDED, plan.engine, DraftChoice.parse(draft))
    assert plan.total == found.counted + found.graphs + RUNTIME
    short, budgets = plan, [plan.engine.prefill_budget]
    while short.engine.pages == plan.engine.pages:  # buffers of prompts are given up before pages are
        less = short.total - short.kv_bytes // 2
        short = plan_engine(asked, Reading(less, 2 * GIB))
        found = measure(EMBEDDED, short.engine, DraftChoice.parse(draft))
        assert found.counted + found.graphs + RUNTIME <= short.total <= less
        budgets.append(short.engine.prefill_budget)
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[-1] < budgets[0]
    assert short.engine.pages >= 128
    with pytest.raises(RequestError, match=r"buffers of steps .* MiB, buffers of prompts"):
        plan_engine(asked, Reading(short.total - short.kv_bytes, 2 * GIB))


def long_model(tmp_path: Path) -> ServerConfig:
    """Made for 262,144 tokens, as the models that are meant are."""
    write_random_checkpoint(tmp_path, small_config(max_position_embeddings=262_144))
    return ServerConfig(tmp_path, ("long",), users=4, reserve=0)


def test_the_context_is_the_models_own_as_far_as_memory_allows(tmp_path: Path) -> None:
    asked = long_model(tmp_path)
    plan = plan_engine(asked, PLENTY)
    assert plan.context == 262_144
    assert plan.engine.pages == (262_144 + 3 * 32_768) // PAGE_SIZE
    page = plan.kv_bytes // plan.engine.pages
    short = plan_engine(asked, Reading(plan.total - plan.kv_bytes + 1000 * page, PLENTY.total))
    assert short.context == short.engine.pages * PAGE_SIZE
    assert 900 * PAGE_SIZE < short.context <= 1000 * PAGE_SIZE + 262_144 // 10
    with pytest.raises(RequestError, match="one request of 262,144 tokens does not fit"):
        plan_engine(replace(asked, context=262_144), Reading(short.reading.available, PLENTY.total))
    with pytest.raises(RequestError, match="does not fit"):
        plan_engine(asked, Reading(RUNTIME + 16 * page, PLENTY.total))


def test_a_card_with_memory_of_its_own_is_judged_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo(tmp_path / "meminfo", 57.8, 128)
    monkeypatch.setenv(PROC, str(tmp_path))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (139 * GIB, 140 * GIB))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(is_integrated=False))
    found = read_memory("cuda")
    assert (found.available, found.total, found.host) == (139 * GIB, 140 * GIB, read_memory())
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(is_integrated=True))
    unified = read_memory("cuda")
    assert (unified.available, unified.host) == (int(57.8 * (1 << 20)) * 1024, None)


HOST = Reading(40 * GIB, 2048 * GIB)  # little is free, and 8 % of it all would be 164 GiB


def test_a_card_needs_little_of_its_host() -> None:
    pytest.importorskip("triton")
    asked = config(device="cuda")
    plan = plan_engine(asked, Reading(139 * GIB, 140 * GIB, HOST))
    assert not any(item.name == "runtime" for item in plan.items), "which is the host's affair"
    assert plan.reading.host_reserve == 2 * GIB, "the guard of the host must not end a server that has just started"
    with pytest.raises(RequestError) as refused:
        plan_engine(asked, Reading(139 * GIB, 140 * GIB, Reading(5 * GIB, 64 * GIB)))
    for words in ("the host has 5.0 GiB", "2.0 GiB stay free", "need 3.5 GiB of it beside the card"):
        assert words in str(refused.value)


def test_a_card_that_is_too_small_is_refused_with_its_own_numbers() -> None:
    pytest.importorskip("triton")
    with pytest.raises(RequestError) as refused:
        plan_engine(config(device="cuda"), Reading(GIB // 2, GIB, HOST))
    found = str(refused.value)
    assert "512.0 MiB available on the card" in found
    assert "40.0 GiB" not in found


def test_unified_memory_has_to_hold_processes_too() -> None:
    pytest.importorskip("triton")
    plan = plan_engine(config(device="cuda"), Reading(57 * GIB, 120 * GIB))
    assert plan.memory.sum_of("runtime") == RUNTIME
    assert plan.reading.host_reserve == plan.reading.reserve == int(120 * GIB * 0.08)


def test_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = read_memory()
    assert 0 < real.available <= real.total
    meminfo(tmp_path / "meminfo", 3.5)
    monkeypatch.setenv(PROC, str(tmp_path))
    assert read_memory() == Reading(int(3.5 * GIB), 16 * GIB)


def test_a_control_group_with_less_than_the_host_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{2 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB + (256 << 20)}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {256 << 20}\n")
    monkeypatch.setattr("stoker.server.lifecycle.memory_guard._group_folders", lambda: [tmp_path, tmp_path / "none"])
    assert read_memory() == Reading(GIB, 2 * GIB)
    (tmp_path / "memory.max").write_text("max\n")
    assert read_memory().total > 2 * GIB


def test_the_guard_goes_one_step_further_per_reading_and_back() -> None:
    done: list[str] = []
    available = 4 * GIB
    guard = MemoryGuard(
        lambda: Reading(available, 16 * GIB),
        2 * GIB,
        lambda: done.append("shed"),
        lambda reason: done.append("turned away"),
        lambda reason: done.append("ended"),
    )
    guard.look()
    assert done == []
    available = int(0.9 * GIB)
    guard.look()
    assert done == ["shed"]
    guard.look()
    assert done == ["shed", "turned away"]
    assert guard.short
    guard.look()
    assert done == ["shed", "turned away"], "above a quarter of the reserve it goes on serving what runs"
    available = 4 * GIB
    guard.look()
    assert not guard.short
    available = int(0.1 * GIB)
    for _ in range(5):
        guard.look()
    assert done == ["shed", "turned away", "shed", "turned away", "ended"]


def test_a_server_that_runs_out_of_memory_gives_up_caches_then_requests_then_itself(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    meminfo(file, 10.0)
    options = ("--model", "demo", "--users", "1", "--reserve", "2", "--drain-timeout", "3", "--draft", "none")
    slowly = {"STOKER_TEST_PAUSE": "0.15"}  # what runs must outlast two looks at the memory
    server = Running(*options, module="tests.server.faulty", env={PROC: str(tmp_path), **slowly}).wait()
    server.chat("A long question that is worth keeping. " * 20, max_tokens=2)
    server.until(lambda: server.get("/state").json()["engine"]["checkpoints"] > 0, "a checkpoint")
    answers: list[dict[str, object]] = []

    def ask(tokens: int) -> None:
        body = chat_body(max_tokens=tokens, ignore_eos=True, seed=SLOW)
        answers.append(server.post("/v1/chat/completions", body).json())

    running = threading.Thread(target=ask, args=(60,))
    running.start()
    server.until(lambda: server.get("/state").json()["engine"]["running"] == 1, "a running request")
    waiting = threading.Thread(target=ask, args=(3,))
    waiting.start()
    server.until(lambda: server.get("/state").json()["engine"]["waiting"] == 1, "a waiting request")
    meminfo(file, 0.9)  # less than half the reserve
    waiting.join(PATIENCE_S)
    assert "turned away" in json.dumps(answers[0])
    assert server.gauges()["stoker:prefix_cache_sheds_total"] == 1
    refused = server.post("/v1/chat/completions", chat_body())
    assert refused.status_code == 503
    assert "Memory runs short" in refused.json()["error"]["message"]
    running.join(PATIENCE_S)
    assert answers[1]["usage"]["completion_tokens"] == 60, "what ran went on"  # type: ignore[index]
    meminfo(file, 10.0)
    server.until(lambda: server.post("/v1/chat/completions", chat_body(max_tokens=2)).status_code == 200, "service")
    meminfo(file, 0.2)
    assert server.process.wait(PATIENCE_S) == 2
    log = server.log
    server.stop()
    assert "the prefix cache is given up" in log
    assert "ended before the host had to swap" in " ".join(log.split())
    assert "Traceback" not in log


def test_a_start_beyond_the_reserve_is_refused_at_once(tmp_path: Path) -> None:
    meminfo(tmp_path / "meminfo", 1.0)
    server = Running("--model", "demo", env={PROC: str(tmp_path)})
    began = time.monotonic()
    assert server.process.wait(PATIENCE_S) == 2
    assert "does not fit" in " ".join(server.log.split())
    assert "Traceback" not in server.log
    assert time.monotonic() - began < PATIENCE_S
    server.stop()


# -- in a control group, where one can be made


@pytest.fixture
def group() -> Iterator[Path]:
    """Below this process's own, so that whatever holds for it holds for its child."""
    mine = str(os.getpid())
    for parent in _group_folders():
        folder = parent / f"stoker-test-{mine}"
        try:
            if mine in (parent / "cgroup.procs").read_text().split():
                folder.mkdir()
        except OSError:
            continue
        if _limit_file(folder):
            try:
                yield folder
            finally:
                _remove(folder)
            return
        if folder.exists():
            folder.rmdir()
    pytest.skip("no control group with a memory limit can be made here")


def _remove(folder: Path) -> None:
    """A group can be removed once its last process has ended; what a failed test left in it is ended here."""
    until = time.monotonic() + PATIENCE_S
    while True:
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
        else:
            return


def _limit_file(folder: Path) -> Path | None:
    return next((file for name in ("memory.max", "memory.limit_in_bytes") if (file := folder / name).exists()), None)


def _kills(folder: Path) -> int:
    """How often the kernel has killed for want of memory."""
    [file] = [file for name in ("memory.events", "memory.oom_control") if (file := folder / name).exists()]
    return int(dict(line.split() for line in file.read_text().splitlines())["oom_kill"])


# Takes 32 MiB every half second, in its parent's control group, for as long as the process given is there.
HOG = """
import os, sys, time
taken = []
while os.path.exists(f"/proc/{sys.argv[1]}/exe"):
    taken.append(b"x" * (32 << 20))
    time.sleep(0.5)
"""


@pytest.mark.long
def test_in_a_control_group_that_fills_up_nobody_is_killed(group: Path) -> None:
    """A neighbour takes what there is. Requests are answered or refused, and the server ends before the kernel acts."""
    limit = _limit_file(group)
    assert limit
    limit.write_text(str(2560 << 20))
    server = Running("--model", "demo", "--users", "2", "--reserve", "1", "--drain-timeout", "2", "--no-self-test")
    (group / "cgroup.procs").write_text(str(server.process.pid))  # before the engine is started: it inherits
    server.wait()
    assert server.gauges()["stoker:memory_available_bytes"] < 2560 << 20, "the group's limit is known"
    hog = subprocess.Popen([sys.executable, "-c", HOG, str(server.process.pid)])
    (group / "cgroup.procs").write_text(str(hog.pid))
    statuses: list[int] = []
    with contextlib.suppress(httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):  # it is gone
        while server.process.poll() is None:
            statuses.append(server.post("/v1/chat/completions", chat_body(max_tokens=8)).status_code)
    assert server.process.wait(PATIENCE_S) == 2
    assert hog.wait(PATIENCE_S) == 0
    log = " ".join(server.log.split())
    server.stop()
    assert _kills(group) == 0
    assert set(statuses) <= {200, 503}
    assert 200 in statuses
    assert "the prefix cache is given up" in log
    assert "ended before the host had to swap" in log
    limit.write_text(str(1 << 30))
    server = Running("--model", "demo")
    (group / "cgroup.procs").write_text(str(server.process.pid))
    assert server.process.wait(PATIENCE_S) == 2
    assert "does not fit" in " ".join(server.log.split())
    server.stop()
    assert _kills(group) == 0
