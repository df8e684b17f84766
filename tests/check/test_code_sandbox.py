"""Whatever generated code does costs its own item: the process is real, and so is everything it tries."""

import os
import socket
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from stoker.check import code_sandbox
from stoker.check.code_sandbox import Ran, run_cases

pytestmark = pytest.mark.skipif(bool(code_sandbox.unavailable()), reason=code_sandbox.unavailable() or "-")


def run(body: str, *, modules: tuple[str, ...] = (), seconds: int = 5, **limits: int) -> Ran:
    program = "def attack():\n" + textwrap.indent(textwrap.dedent(body), "    ")
    return run_cases(program, "attack", [[]], seconds=seconds, modules=modules, **limits)


def refused(ran: Ran) -> bool:
    return "PermissionError" in str(ran.results[0].get("error"))


def test_a_function_is_called_once_per_case():
    ran = run_cases("import math\ndef f(a, b):\n    return math.gcd(a, b)", "f", [[12, 18], [7, 0], ["x", 1]])
    assert ran.results[:2] == [{"value": 6}, {"value": 7}]
    assert "TypeError" in ran.results[2]["error"]
    assert run_cases("def f(: pass", "f", [[]]).failure.startswith("SyntaxError")
    assert "KeyError" in run_cases("x = 1", "f", [[]]).failure


def test_fork_bombs_and_threads_are_refused():
    before = len(psutil.Process().children(recursive=True))
    assert refused(run("import os\nwhile True:\n    os.fork()"))
    assert (
        "can't start new thread"
        in run("import threading\nthreading.Thread(target=print).start()", modules=("threading",)).results[0]["error"]
    )
    assert refused(run("import subprocess\nsubprocess.run(['true'])", modules=("subprocess",)))
    assert refused(run("import os\nos.execv('/bin/sh', ['sh'])"))
    assert len(psutil.Process().children(recursive=True)) == before


def test_files_can_be_neither_read_nor_written_nor_listed(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("42")
    assert refused(run(f"return open({str(secret)!r}).read()"))
    assert refused(run(f"open({str(tmp_path / 'new')!r}, 'w').write('x')"))
    assert refused(run(f"import os\nos.remove({str(secret)!r})"))
    assert refused(run("import os\nreturn os.listdir('/')"))
    assert refused(run("import os\nos.mkdir('/tmp/made')"))
    assert secret.read_text() == "42"
    assert list(tmp_path.iterdir()) == [secret]
    assert run("import os\nreturn dict(os.environ)").results == [{"value": {}}]


def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.2)
        port = listening.getsockname()[1]
        assert refused(run(f"import socket\nsocket.socket().connect(('127.0.0.1', {port}))", modules=("socket",)))
        with pytest.raises(TimeoutError):
            listening.accept()
    assert refused(run("import socket\nsocket.socket(socket.AF_UNIX)", modules=("socket",)))


def test_endless_loops_end():
    began = time.monotonic()
    ran = run("while True:\n    pass", seconds=1)
    assert ran.failure == "took too long"
    assert time.monotonic() - began < 4
    ran = run_cases("def f(n):\n    while n:\n        pass\n    return n", "f", [[0], [1], [0]], seconds=1)
    assert ran.results == [{"value": 0}, {"error": "took too long"}, {"error": "took too long"}]


def test_sleeping_and_ignoring_signals_does_not_help():
    ran = run(
        "import signal, time\nfor n in range(1, 32):\n    try:\n        signal.signal(n, signal.SIG_IGN)\n"
        "    except Exception:\n        pass\ntime.sleep(60)",
        modules=("signal",),
        seconds=1,
    )
    assert ran.failure == "took too long"


def test_memory_and_output_have_limits():
    assert "MemoryError" in run("return len(b'x' * (10 * 2**30))").results[0]["error"]
    assert "MemoryError" in str(run("kept = []\nwhile True:\n    kept.append(b'x' * 2**24)"))
    assert "more than" in run("import os\nwhile True:\n    os.write(3, b'x' * 65536)").failure
    assert run("print('noise' * 1000)\nreturn 1").results == [{"value": 1}]
    assert run("def deep(n):\n    return deep(n + 1)\nreturn deep(0)").results[0]["error"].startswith("RecursionError")


def test_the_parent_and_others_get_no_signals():
    assert refused(run("import os\nos.kill(os.getppid(), 9)"))
    assert refused(run(f"import os\nos.kill({os.getpid()}, 15)"))
    assert refused(run("import os\nos.killpg(0, 9)"))
    assert refused(run("import os\nos.setsid()"))


def test_a_raw_system_call_is_refused_too():
    body = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nreturn [libc.syscall(n, 0, 0, 0), ctypes.get_errno()]"
    )
    for number in (57, 435, 62, 257, 41, 101):  # fork clone3 kill openat socket ptrace on x86_64
        ran = run(body.replace("(n,", f"({number},"), modules=("ctypes",))
        assert ran.results == [{"value": [-1, 1]}] or os.uname().machine != "x86_64"


def test_a_crash_is_its_own():
    ran = run("import ctypes\nctypes.string_at(0)", modules=("ctypes",))
    assert "status -11" in ran.failure
    assert run("import os\nos._exit(0)").failure == "ended early"
    assert run("import sys\nsys.exit(3)").results[0]["error"].startswith("SystemExit")
