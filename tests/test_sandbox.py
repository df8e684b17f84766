"""What hangs, crashes or fills memory in a sandbox costs its own call; the next one gets an answer."""

import contextlib
import ctypes
import importlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.sandbox import Busy, Crashed, Failed, MemoryLimit, Sandbox, TimeLimit


def add(left: int, right: int) -> int:
    return left + right


def pid() -> int:
    return os.getpid()


def hang() -> None:
    while True:
        pass


def crash() -> None:
    ctypes.string_at(0)


KEPT: list[bytes] = []


def fill(size: int) -> int:
    KEPT.append(b"x" * size)
    return len(KEPT[-1])


def fail(message: str) -> None:
    raise ValueError(message)


def nested() -> None:
    nested()


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    found = Sandbox(memory=128 * 2**20)
    yield found
    found.close()


def test_starting_a_child_does_not_count_towards_the_time_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(1.5)\ndef answer(): return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.closing(Sandbox()) as sandbox:
        assert sandbox.call(importlib.import_module("slow_to_import").answer, timeout=1) == 42


def test_results_come_back_and_the_child_is_kept(sandbox: Sandbox) -> None:
    assert sandbox.call(add, 2, 3, timeout=20) == 5
    first = sandbox.call(pid, timeout=20)
    assert first != os.getpid()
    assert sandbox.call(pid, timeout=20) == first


def test_a_hang_is_ended_in_time(sandbox: Sandbox) -> None:
    sandbox.call(add, 1, 1, timeout=20)
    before = time.monotonic()
    with pytest.raises(TimeLimit, match=r"0\.3 s"):
        sandbox.call(hang, timeout=0.3)
    assert time.monotonic() - before < 3
    assert sandbox.call(add, 2, 2, timeout=20) == 4


def test_a_crash_costs_one_call(sandbox: Sandbox) -> None:
    with pytest.raises(Crashed):
        sandbox.call(crash, timeout=20)
    assert sandbox.call(add, 2, 2, timeout=20) == 4


def test_memory_is_bounded_and_a_child_that_grew_is_replaced(sandbox: Sandbox) -> None:
    child = sandbox.call(pid, timeout=20)
    with pytest.raises(MemoryLimit):
        sandbox.call(fill, 512 * 2**20, timeout=20)
    other = sandbox.call(pid, timeout=20)
    assert other != child
    assert sandbox.call(fill, 100 * 2**20, timeout=20) == 100 * 2**20
    assert sandbox.call(pid, timeout=20) != other


def test_exceptions_arrive_with_their_text(sandbox: Sandbox) -> None:
    with pytest.raises(Failed, match="no such thing") as failed:
        sandbox.call(fail, "no such thing", timeout=20)
    assert failed.value.kind == "ValueError"
    with pytest.raises(Failed, match="nested too deeply"):
        sandbox.call(nested, timeout=20)
    with pytest.raises(Failed, match="JSON"):
        sandbox.call(set, timeout=20)


def test_who_finds_no_free_child_is_told(sandbox: Sandbox) -> None:
    sandbox.call(add, 1, 1, timeout=20)

    def work() -> None:
        with contextlib.suppress(TimeLimit):
            sandbox.call(hang, timeout=1)

    busy = threading.Thread(target=work)
    busy.start()
    time.sleep(0.2)
    with pytest.raises(Busy, match="Try again"):
        sandbox.call(add, 1, 1, timeout=20, wait=0.1)
    busy.join()
    assert sandbox.call(add, 1, 1, timeout=20) == 2


def test_closing_ends_a_child_at_work() -> None:
    sandbox = Sandbox()
    number = sandbox.call(pid, timeout=20)
    ended: list[BaseException] = []

    def work() -> None:
        try:
            sandbox.call(hang, timeout=30)
        except Crashed as error:
            ended.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    time.sleep(0.2)
    sandbox.close()
    worker.join(5)
    assert ended
    assert not worker.is_alive()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
    with pytest.raises(Crashed, match="closed"):
        sandbox.call(add, 1, 1, timeout=20, wait=0.1)
