"""Whatever generated code does costs its own item: the process is real, and so is everything it tries.

What is refused in the sandbox is tried outside it too, as the same user: there it succeeds, so the sandbox is what
refuses it. All of it runs once more as a user without any rights.
"""

import contextlib
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from stoker.check import code_jail, code_sandbox
from stoker.check.code_sandbox import Ran, run_cases

# Not where the sandbox says that it is unavailable: where it should run and does not, tests fail.
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in code_jail.NUMBERS, reason="code is confined on Linux only"
)
NOBODY = 65534


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


def outside(body: str) -> str:
    """What the same code says in a process of the same user without the sandbox; it ends with `print`."""
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)], capture_output=True, text=True, timeout=30, check=True
    )
    return ran.stdout.strip()


def test_the_sandbox_is_there():
    code_sandbox.unavailable.cache_clear()
    assert code_sandbox.unavailable() == ""


def test_what_is_refused_inside_succeeds_outside(tmp_path: Path):
    """Otherwise the tests below would pass without a sandbox."""
    secret = tmp_path / "secret"
    secret.write_text("42")
    assert outside("import os\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\n    print('forked')") == "forked"
    assert outside("import subprocess\nprint(subprocess.run(['true']).returncode)") == "0"
    assert outside("import threading\nt = threading.Thread(target=print, args=('thread',))\nt.start()") == "thread"
    assert outside(f"print(open({str(secret)!r}).read())") == "42"
    assert outside(f"import os\nos.mkdir({str(tmp_path / 'made')!r})\nprint(os.listdir({str(tmp_path)!r}))") != "[]"
    assert "bin" in outside("import os\nprint(os.listdir('/'))")
    assert outside("import os\nos.setsid()\nprint('alone')") == "alone"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        where = listening.getsockname()
        assert outside(f"import socket\nsocket.create_connection({where})\nprint('connected')") == "connected"
        listening.settimeout(5)
        listening.accept()[0].close()
    assert outside("import os\nos.kill(os.getppid(), 0)\nprint('may')") == "may"
    assert outside(f"import os\nos.kill({os.getpid()}, 0)\nprint('may')") == "may"
    assert outside("print(len(bytes(10**9)))") == "1000000000", "twice the sandbox's memory"
    if os.uname().machine == "x86_64":
        call = "import ctypes, os\nlibc = ctypes.CDLL(None)\nprint(libc.syscall(62, os.getppid(), 0))"
        assert outside(call) == "0", "kill by its number"


NAMELESS = ["unshare", "--user", f"--map-user={NOBODY}", f"--map-group={NOBODY}"]


def _can_be_nobody() -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run([*NAMELESS, "true"], capture_output=True, check=False).returncode == 0
    return False


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="these tests run without root as it is")
@pytest.mark.skipif(not _can_be_nobody(), reason="a user namespace cannot be made here")
def test_a_user_without_rights_is_confined_as_well():
    """All tests of this file again, in a user namespace as nobody: with no capability, but able to read this Python."""
    ran = subprocess.run(
        [*NAMELESS, sys.executable, "-m", "pytest", "-q", "-x", "-rs", "-p", "no:cacheprovider", __file__],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"\b1[0-9] passed, 1 skipped", ran.stdout), ran.stdout
    assert "without root as it is" in ran.stdout, "the one skipped is this test"


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


def test_ten_gigabytes_are_never_touched():
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    body = "kept = []\nfor size in (10 * 2**30, 2**30, 600 * 2**20):\n    try:\n        kept.append(bytearray(size))\n"
    ran = run(body + "    except MemoryError:\n        pass\nreturn len(kept)")
    assert ran.results == [{"value": 0}]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert peak <= max(before, code_sandbox.MEMORY >> 10), "the largest process ever waited for, in KiB"


def test_memory_and_output_have_limits():
    assert "MemoryError" in run("return len(b'x' * (10 * 2**30))").results[0]["error"]
    assert "MemoryError" in str(run("kept = []\nwhile True:\n    kept.append(b'x' * 2**24)", seconds=30))
    assert "more than" in run("import os\nwhile True:\n    os.write(3, b'x' * 65536)").failure
    assert run("print('noise' * 1000)\nreturn 1").results == [{"value": 1}]
    assert run("def deep(n):\n    return deep(n + 1)\nreturn deep(0)").results[0]["error"].startswith("RecursionError")


def test_the_parent_and_others_get_no_signals():
    assert refused(run("import os\nos.kill(os.getppid(), 9)"))
    assert refused(run(f"import os\nos.kill({os.getpid()}, 15)"))
    assert refused(run("import os\nos.killpg(0, 9)"))
    assert refused(run("import os\nos.setsid()"))
    assert refused(run("import signal\nsignal.pidfd_send_signal(0, 9)", modules=("signal",)))


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
