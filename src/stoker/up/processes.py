"""The processes of an engine, one per launch, here or on another host: started in order, and ended all together."""

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil

from stoker.engines.engine import PORT, Launch
from stoker.up import launcher

# The first two notice within 6 s that the other host, or the way to it, is gone; the last, that the port is taken.
SSH_OPTIONS = (
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=2"),
    *("-o", "ServerAliveCountMax=3"),
    *("-o", "ExitOnForwardFailure=yes"),
)
# Secrets that an engine on another host gets too. They travel over ssh's standard input, never on a command line.
FORWARDED = ("HF_TOKEN", "VLLM_API_KEY", "STOKER_API_KEY")
HEARTBEAT_S = 2.0
REMOTE_QUIET_S = 20.0  # without a sign of life from the keeper, the launcher on another host ends its command
LONGEST = 16384  # bytes of a line
EXIT_POLL_S = 0.05
KILL_S = 3.0  # that a launcher may take beyond the grace before it is killed itself

_PID = re.compile(re.escape(launcher.PID_LINE.encode()) + rb"(\d+)\n")
_LAUNCHER = Path(launcher.__file__)
# What python3 on another host is given: it reads its program first, as many bytes as the first line says.
_BOOT = """import sys
read = sys.stdin.buffer.raw
size, source = int(read.readline()), b""
while len(source) < size:
    source += read.read(size - len(source))
exec(compile(source, "launcher", "exec"))"""


def ssh_command(host: str, port: int | None = None, arguments: Sequence[str] = ()) -> list[str]:
    """What runs a program on another host, given on standard input after its size. With a port, the loopback port of
    that number here leads to the one there."""
    forward = [] if port is None else ["-L", f"127.0.0.1:{port}:127.0.0.1:{port}"]
    return ["ssh", *SSH_OPTIONS, *forward, host, "--", shlex.join(["python3", "-c", _BOOT, *arguments])]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class EngineProcess:
    """A launch that runs. Its output goes to `write` in whole lines, with all secrets still in it."""

    _live: ClassVar[set[int]] = set()  # launchers
    _starting: ClassVar[int] = 0

    def __init__(self, launch: Launch, port: int, process: asyncio.subprocess.Process, write: Callable[[bytes], Any]):
        self.launch, self._process, self._write = launch, process, write
        self.launcher = process.pid  # or ssh
        self.pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()  # of the command, on its host
        self._reading = asyncio.create_task(self._read())
        self._beating = asyncio.create_task(self._beat())

    @classmethod
    async def start(
        cls,
        launch: Launch,
        port: int,
        folder: Path,
        environment: Mapping[str, str],
        write: Callable[[bytes], Any],
        answers: bool,
    ) -> "EngineProcess":
        """`answers`: this launch answers requests, so its port must be reachable from here."""
        own = {key: value.replace(PORT, str(port)) for key, value in launch.env.items()}
        order: dict[str, Any] = {
            "command": [part.replace(PORT, str(port)) for part in launch.command],
            "files": {name: text.replace(PORT, str(port)) for name, text in launch.files.items()},
            "cleanup": [part.replace(PORT, str(port)) for part in launch.cleanup],
        }
        if launch.host:
            command = ssh_command(launch.host, port if answers else None)
            own |= {"PYTHONUNBUFFERED": "1"} | {key: environment[key] for key in FORWARDED if key in environment}
            order |= {"environment": own, "folder": "", "quiet_s": REMOTE_QUIET_S}
            program = _LAUNCHER.read_bytes()
            begin = b"%d\n%b" % (len(program), program)
        else:
            command = [sys.executable, "-I", "-S", str(_LAUNCHER)]
            order |= {"environment": own, "folder": str(folder), "quiet_s": None}
            begin = b""
        cls._starting += 1
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={"PYTHONUNBUFFERED": "1", **environment},
                start_new_session=True,
            )
            cls._live.add(process.pid)
        finally:
            cls._starting -= 1
        assert process.stdin
        process.stdin.write(begin + json.dumps(order).encode() + b"\n")
        return cls(launch, port, process, write)

    async def ended(self) -> str:
        """Waits for its end. A sentence that says how it ended."""
        code = await self._exit()
        where = f" on {self.launch.host}" if self.launch.host else ""
        if self.launch.host and code == 255:
            return f"the connection to {self.launch.host} by ssh failed or was lost"
        return f"the engine process{where} {_exit(code)}"

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL for what is left of it after `grace_s`. Returns when nothing is."""
        self._say(f"stop {grace_s:g}\n")
        try:
            async with asyncio.timeout(grace_s + KILL_S):
                await self._exit()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.launcher, signal.SIGKILL)
            await self._exit()
        finally:
            self._beating.cancel()
            if self._process.returncode is None:  # this task was cancelled
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.launcher, signal.SIGKILL)
        self._live.discard(self.launcher)
        if (self._process.returncode or 0) < 0:
            self._end_orphans()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.shield(self._reading)
        self._reading.cancel()

    @classmethod
    def _end_orphans(cls) -> None:
        """A launcher that was killed leaves its descendants to the keeper, which is their subreaper."""
        if not cls._starting:
            orphans = [each for each in psutil.Process().children() if each.pid not in cls._live]
            family = [below for each in orphans for below in (*each.children(recursive=True), each)]
            for each in family:
                with contextlib.suppress(psutil.Error):
                    each.kill()
            psutil.wait_procs(family, timeout=KILL_S)

    async def _exit(self) -> int:
        """asyncio's own wait would also wait for everyone who has inherited the pipes."""
        while (code := self._process.returncode) is None:
            await asyncio.sleep(EXIT_POLL_S)
        return code

    def _say(self, words: str) -> None:
        assert self._process.stdin
        with contextlib.suppress(OSError, RuntimeError):
            self._process.stdin.write(words.encode())

    async def _beat(self) -> None:
        while self._process.returncode is None:
            self._say("\n")
            await asyncio.sleep(HEARTBEAT_S)

    async def _read(self) -> None:
        """Lines, at carriage returns too, since progress bars have no others. What is longer is cut."""
        output = self._process.stdout
        assert output
        text = b""
        while read := await output.read(65536):
            text += read
            end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
            if end == 0 and len(text) > LONGEST:
                end = len(text)
            lines, text = text[:end], text[end:]
            if not self.pid.done() and (found := _PID.search(lines)):
                self.pid.set_result(int(found[1]))
                lines = lines.replace(found[0], b"", 1)
            if lines:
                self._write(lines)
        if text:
            self._write(text + b"\n")


def _exit(code: int) -> str:
    number = -code if code < 0 else code - 128 if code > 128 else 0
    if number in set(signal.Signals):
        name = signal.Signals(number).name
        return f"was killed by {name}" + (" (most often for want of memory)" if name == "SIGKILL" else "")
    return f"ended with exit code {code}"


async def first_end(processes: Sequence[EngineProcess]) -> str:
    """Waits until one of them has ended. A sentence that says which and how."""
    waiting = [asyncio.create_task(each.ended()) for each in processes]
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
    finally:
        for each in waiting:
            each.cancel()
