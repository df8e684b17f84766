"""The process in which generated code runs: `python -I -S code_jail.py`, a JSON job on stdin, a line out per case.

Everything it will need is imported first; then the kernel is told to refuse every system call but a few that compute,
keep time and write to files that are open already (seccomp, which needs no root and cannot be undone). So there are no
files, no network, no processes, no threads and no signals to others. Nothing of the package is imported here.
"""

import contextlib
import ctypes
import importlib
import json
import os
import platform
import resource
import signal
import struct
import sys
from typing import Any

# What solutions may import. The file system is out of reach later on.
MODULES = (
    "abc array base64 bisect calendar cmath collections collections.abc contextlib copy dataclasses datetime "
    "decimal difflib enum fractions functools hashlib heapq inspect io itertools json math numbers operator os "
    "random re statistics string struct sys textwrap time traceback types typing unicodedata zlib _strptime "
    "encodings.ascii encodings.latin_1 encodings.utf_8 encodings.utf_16 "
)
# The system calls that are left, and their numbers in the same order.
CALLS = (
    "read write close fstat lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn mremap madvise "
    "sched_yield nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday getpid getppid getuid "
    "geteuid gettid getrandom futex exit exit_group sigaltstack getrusage times restart_syscall rseq"
)
NUMBERS = {
    "x86_64": "0 1 3 5 8 9 10 11 12 13 14 15 25 28 24 35 230 228 229 96 39 110 102 107 186 318 202 60 231 131 98 100 "
    "219 334",
    "aarch64": "63 64 57 80 62 222 226 215 214 134 135 139 216 233 124 101 115 113 114 169 172 173 174 175 178 278 98 "
    "93 94 132 165 153 128 293",
}
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
UNKNOWN_ABI = 0x40000000  # x32 calls have this bit
REFUSED, ALLOW, KILL = 0x00050001, 0x7FFF0000, 0x80000000  # errno 1: operation not permitted
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 1, 38, 22, 2
UNCONFINED = 3  # exit status if the kernel cannot confine the process
TOLD = 300  # characters of an error


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    job = json.load(sys.stdin)
    out = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    os.close(nowhere)
    for module in [*MODULES.split(), *job.get("modules", [])]:
        importlib.import_module(module)
    os.environ.clear()
    for limit, most in (
        (resource.RLIMIT_AS, job["memory"]),
        (resource.RLIMIT_CPU, job["seconds"] + 1),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    if not _confine(libc):
        os._exit(UNCONFINED)
    _run(job, out)
    os._exit(0)


def _confine(libc: ctypes.CDLL) -> bool:
    machine = platform.machine()
    architecture, allowed = ARCHITECTURES[machine], map(int, NUMBERS[machine].split())
    program = [
        _load(4),
        _jump(architecture, 1, 0),
        _return(KILL),
        _load(0),
        _at_least(UNKNOWN_ABI, 0, 1),
        _return(REFUSED),
    ]
    for number in allowed:
        program += [_jump(number, 0, 1), _return(ALLOW)]
    code = b"".join([*program, _return(REFUSED)])
    held = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    return libc.prctl(PR_SET_SECCOMP, FILTER, ctypes.c_char_p(head), 0, 0) == 0


def _load(offset: int) -> bytes:
    return struct.pack("HBBI", 0x20, 0, 0, offset)


def _jump(value: int, yes: int, no: int) -> bytes:
    return struct.pack("HBBI", 0x15, yes, no, value)


def _at_least(value: int, yes: int, no: int) -> bytes:
    return struct.pack("HBBI", 0x35, yes, no, value)


def _return(value: int) -> bytes:
    return struct.pack("HBBI", 0x06, 0, 0, value)


def _run(job: dict[str, Any], out: int) -> None:
    space: dict[str, Any] = {"__name__": "solution"}
    try:
        exec(compile(job["program"], "solution", "exec"), space)
        function = space[job["function"]]
    except BaseException as error:
        _write(out, {"failure": _said(error)})
        return
    for given in job["inputs"]:
        try:
            result = {"value": function(*given)}
            line = json.dumps(result)
        except BaseException as error:
            result = {"error": _said(error)}
            line = json.dumps(result)
        _write_line(out, line)


def _said(error: BaseException) -> str:
    with contextlib.suppress(BaseException):
        return f"{type(error).__name__}: {error}"[:TOLD]
    return type(error).__name__


def _write(out: int, result: dict[str, Any]) -> None:
    _write_line(out, json.dumps(result))


def _write_line(out: int, line: str) -> None:
    data = line.encode() + b"\n"
    while data:
        data = data[os.write(out, data) :]


if __name__ == "__main__":
    main()
