"""One engine while it runs: its processes, its log, its address, and how far its start is."""

import asyncio
import functools
import shutil
import string
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path

from stoker.engines.engine import KEYS, Phase, find
from stoker.up.front import Backend
from stoker.up.logs import Log, last_lines, masking
from stoker.up.processes import EngineProcess, first_end, free_port
from stoker.up.state import Instance, PhaseTime, Process
from stoker.up.watch import Fault, Questions, Timing, watch

FIRST_POLL_S = 0.5  # between questions to an engine that starts, at most
RECENT = 100  # restarts whose time is kept
LAST_WORDS = 3  # lines of the log in the reason of a fault
LONGEST = 600  # characters of such a line
HEADER = "--- stoker up:"  # begins the line that says when a start began
FRAMES = "│╭╮╰╯─┃┏┓┗┛━"  # around errors, as rich draws them


class Running:
    """Starts, follows and ends an engine. All methods belong to one task."""

    def __init__(
        self,
        data: Instance,
        folder: Path,
        environment: Mapping[str, str],
        timing: Timing,
        changed: Callable[[], None],
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        """`folder` holds its log and what its processes write; `changed` is called when `data` is worth saving; `idle`
        says whether the card draws as little power as if nothing ran."""
        self.data = data
        self.backend: Backend | None = None
        self.busy = False
        self.in_a_row = 0  # restarts without an answered request between them
        self.task: asyncio.Task[None] | None = None
        self._folder, self._environment, self._timing, self._changed = folder, environment, timing, changed
        self._idle = idle
        self._processes: list[EngineProcess] = []
        self._stopping: asyncio.Task[None] | None = None
        self._ask: Questions | None = None
        self._phase_at = 0.0
        self._took_s: float | None = None
        self._restarts_at: list[float] = []
        self._engine = find(data.deployment.engine)
        self._log = Log(Path(data.log), masking(environment))

    @property
    def processes(self) -> list[Process]:
        return [Process.of(each.launcher) for each in self._processes]

    @property
    def asks_key(self) -> bool:
        """Whether the environment that it is started with holds the key that clients must have."""
        return bool(self._environment.get(KEYS[self.data.deployment.engine]))

    @property
    def up(self) -> bool:
        return bool(self._processes)

    async def start(self) -> None:
        """All launches, in order."""
        if self._stopping:
            await asyncio.shield(self._stopping)
        data, deployment = self.data, self.data.deployment
        port = free_port()
        data.address, data.state, data.pid = f"http://127.0.0.1:{port}", "starting", 0
        data.phases, data.started_at, data.ready_s = [], time.time(), 0.0
        self._enter(Phase("starting"))
        self._log.write(f"{HEADER} {deployment.recipe} starts at {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())
        for index, launch in enumerate(deployment.launches):
            folder = self._folder / str(index)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            mark = f"[{launch.host or index}] ".encode() if len(deployment.launches) > 1 else b""
            starting = asyncio.create_task(
                EngineProcess.start(
                    launch, port, folder, self._environment, functools.partial(self._read, mark, index == 0), index == 0
                )
            )
            try:
                await asyncio.shield(starting)
            finally:  # if this task is cancelled, too: a process that nobody knows would stay
                self._processes.append(await starting)
        self._processes[0].pid.add_done_callback(self._know)
        self.backend = Backend(data.address)
        self._ask = Questions(data.address, deployment, self._timing, self._environment)
        self._changed()

    async def until_ready(self) -> None:
        """At once if it is ready already. Raises Fault if a process ends or the start takes too long."""
        limit = self.data.deployment.start_timeout_s
        try:
            async with asyncio.timeout(limit):
                await self._or_end(self._poll_ready())
        except TimeoutError:
            phase = self.data.phase.name if self.data.phase else "starting"
            raise Fault(f"it was not ready within {limit:g} s; it was {phase}{self._last_words()}") from None
        if not self.data.ready_s:
            self.data.ready_s = self._took_s = round(time.time() - self.data.started_at, 3)
        self._enter(None)
        self.data.state = "ready"
        self._changed()

    async def watch(self) -> None:
        """Until it must be ended: raises Fault."""
        assert self._ask
        await self._or_end(
            watch(
                self._ask,
                self.data.deployment,
                self._timing,
                self._waiting,
                self._restarted,
                self._set_busy,
                self._idle,
            )
        )

    async def stop(self, grace_s: float) -> None:
        """Ends all processes, also if this task is cancelled meanwhile. May be called again."""
        if self._processes:
            self._stopping = asyncio.create_task(self._stop(self._processes, grace_s))
            self._processes = []
        if self._stopping:
            await asyncio.shield(self._stopping)

    async def _stop(self, processes: list[EngineProcess], grace_s: float) -> None:
        await asyncio.gather(*(each.stop(grace_s) for each in processes), return_exceptions=True)
        if self._ask:
            await self._ask.close()
        self.busy = False
        self.data.pid, self.data.phase = 0, None

    def close(self) -> None:
        """After the last stop."""
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def count_faults(self, times: int, fault: str) -> bool:
        """Whether the engine may be started again after so many faults more."""
        if self.backend and self.backend.answered:
            self.in_a_row = self.backend.answered = 0
        self.in_a_row += times
        self.data.fault = fault
        return self.in_a_row <= self.data.deployment.restarts

    def count_restarts(self, times: int) -> None:
        self.data.restarts += times
        self._restarts_at = [*self._restarts_at, *[time.time()] * times][-RECENT:]

    def recent_restarts(self) -> int:
        """Within the last hour."""
        return sum(at > time.time() - 3600.0 for at in self._restarts_at)

    def expected_s(self) -> float | None:
        """Until it is ready, if it takes as long as the last time."""
        if self._took_s is None:
            return None
        return max(1.0, self._took_s - (time.time() - self.data.started_at))

    def _restarted(self, times: int) -> None:
        """The engine's server restarted the inner process by itself, which counts as if the keeper had."""
        self.count_restarts(times)
        fault = "its server restarted the engine process by itself"
        if not self.count_faults(times, fault):
            raise Fault(fault)
        self._changed()

    def _know(self, pid: "asyncio.Future[int]") -> None:
        if not pid.cancelled():
            self.data.pid = pid.result()

    def _waiting(self) -> int:
        return self.backend.waiting if self.backend else 0

    def _set_busy(self, busy: bool) -> None:
        self.busy = busy

    async def _poll_ready(self) -> None:
        assert self._ask
        while True:
            ready, phase = await self._ask.ready()
            if ready:
                return
            if phase:
                self._enter(phase)
            await asyncio.sleep(min(FIRST_POLL_S, self._timing.poll_s))

    async def _or_end(self, doing: Coroutine[None, None, None]) -> None:
        """Does something as long as all processes live. Raises Fault when one of them ends."""
        task = asyncio.create_task(doing)
        end = asyncio.create_task(first_end(self._processes))
        try:
            await asyncio.wait((task, end), return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                raise Fault(end.result() + self._last_words())
            task.result()
        finally:
            task.cancel()
            end.cancel()

    def _last_words(self) -> str:
        """Of this start."""
        lines: list[str] = []
        for line in last_lines(self._log.path, 200):
            said = line.strip(f"{string.whitespace}{FRAMES}")
            lines = [] if line.startswith(HEADER) else [*lines, said] if said else lines
        found = " / ".join(line[:LONGEST] for line in lines[-LAST_WORDS:])
        return f". Its log ends with: {found}" if found else ""

    def _read(self, mark: bytes, leads: bool, text: bytes) -> None:
        """`leads`: it is the launch that answers requests, whose phases are the service's."""
        self._log.write(b"".join(mark + line for line in text.splitlines(keepends=True)) if mark else text)
        if leads and self.data.state == "starting":
            for line in text.splitlines():
                if phase := self._engine.phase(line.decode("utf-8", "replace")):
                    self._enter(phase)

    def _enter(self, phase: Phase | None) -> None:
        """Keeps the time of the phase that is over."""
        now, before = time.monotonic(), self.data.phase
        self.data.phase = phase
        if phase and before and phase.name == before.name:
            return
        if before:
            self.data.phases = [*self.data.phases, PhaseTime(before.name, round(now - self._phase_at, 3))]
        self._phase_at = now
        self._changed()
