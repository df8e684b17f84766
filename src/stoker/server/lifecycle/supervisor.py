"""Supervises the engine process: loading, ready, crashed, restarted with backoff."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from stoker.engine.event import EngineStats
from stoker.engine.worker.messages import Loading, PhaseTime
from stoker.engine.worker.process import EngineProcess, PreparedProcess
from stoker.engine.worker.spec import Buildable
from stoker.errors import EngineError, StokerError

log = logging.getLogger("stoker.server")

LOADING = ("loading", "compiling", "recording")  # phases in which an engine is built
SAY_S = 10.0  # how often the log says how far a phase is
HEALTH_CHECK_S = 0.5  # interval of health checks
BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)  # before each restart; the last value repeats
STABLE_S = 60.0  # uptime after which the backoff starts over


@dataclass
class Phase:
    """The state of the engine, as /ready shows it."""

    name: str  # starting, loading, compiling, recording, self-test, ready, restarting, stopping, failed
    detail: str = ""  # for people: what is loaded, and how much of it is done
    percent: int | None = None
    began_at: float = 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds left of this phase, extrapolated from its progress."""
        if not self.percent:
            return None
        return (time.monotonic() - self.began_at) * (100 - self.percent) / self.percent


class Supervisor:
    """Runs the engine. `run` returns when the engine is stopped for good."""

    def __init__(
        self,
        spec: Buildable,
        step_timeout: float,
        test: Callable[[EngineProcess], Awaitable[None]] | None = None,
        prepared: PreparedProcess | None = None,
    ) -> None:
        """`test` is awaited after each start, before the engine counts as ready; `prepared` serves the first."""
        self._spec, self._step_timeout, self._self_test, self._prepared = spec, step_timeout, test, prepared
        self.phase = Phase("starting", began_at=time.monotonic())
        self.start_phases: tuple[PhaseTime, ...] = ()  # of the latest start, once it was ready
        self._loading = ""  # the phase that the engine told last
        self._began_at = 0.0  # the start under way
        self._told_at = 0.0  # when the engine told its first phase
        self._said_at = 0.0  # when the log was last told of a phase
        self.engine: EngineProcess | None = None
        self.stats: EngineStats | None = None  # the latest stats
        self.starts = 0
        self.fault: str | None = None  # why the engine crashed last
        self.on_crash: Callable[[str], object] = lambda reason: None

    @property
    def ready(self) -> bool:
        return self.phase.name == "ready" and self.engine is not None and self.engine.alive

    @property
    def healthy(self) -> bool:
        """False from a crash until the next engine is ready. Loading for the first time counts as healthy."""
        first = self.starts <= 1 and self.phase.name not in ("ready", "restarting", "failed")
        return first or self.ready

    @property
    def ready_s(self) -> float | None:
        """Seconds that the latest start took; the first one from the start of this program."""
        return sum(phase.seconds for phase in self.start_phases) if self.start_phases else None

    async def run(self) -> None:
        """Starts the engine, and restarts it whenever it crashes. Raises if the first start cannot succeed."""
        crashes, since = 0, time.monotonic()
        while True:
            try:
                await self._run_once()
            except StokerError as error:
                if self.starts == 1 and not isinstance(error, EngineError):
                    self._enter("failed", str(error))
                    raise
                reason = str(error)
            if self.phase.name == "stopping":
                return
            crashes = crashes + 1 if time.monotonic() - since < STABLE_S else 1
            self.fault, since = reason, time.monotonic()
            self.stats = None
            self._enter("restarting", reason)
            log.error("%s", reason)
            self.on_crash(reason)
            await asyncio.sleep(BACKOFF_S[min(crashes - 1, len(BACKOFF_S) - 1)])

    async def stop(self) -> None:
        """Stops the engine now."""
        self._enter("stopping")
        if self.engine:
            await asyncio.to_thread(self.engine.close)

    async def _run_once(self) -> None:
        """Runs one engine process. Raises the error with which it ended."""
        self.starts += 1
        self._began_at, self._told_at, self._loading = time.monotonic(), 0.0, ""
        if self.engine is None:
            self._enter("loading")
            self.engine = EngineProcess(self._spec, self._on_loading, self._prepared)
        else:
            await asyncio.to_thread(self.engine.restart)
        engine = self.engine
        ready = await asyncio.wrap_future(engine.ready)
        began, loaded_at = self._began_at, time.monotonic()
        for note in ready.notes:
            log.info("note: %s", note)
        watch = asyncio.create_task(self._watch(engine))
        try:
            if self._self_test:
                self._enter("self-test")
                log.info("self-test")
                await self._self_test(engine)
            tested = [PhaseTime("self-test", time.monotonic() - loaded_at)] if self._self_test else []
            before = [PhaseTime("planning", _age() - (time.monotonic() - began))] if self.starts == 1 else []
            launched = PhaseTime("starting the engine", (self._told_at or loaded_at) - began)
            self.start_phases = (*before, launched, *ready.phases, *tested)
            log.info("ready after %.1f s: %s", self.ready_s, ", ".join(map(str, self.start_phases)))
            self._enter("ready")
            self.fault = None
            raise await asyncio.wrap_future(engine.exit_error)
        finally:
            watch.cancel()

    async def _watch(self, engine: EngineProcess) -> None:
        """Updates `stats`, and kills an engine that does not answer within the step timeout."""
        while True:
            try:
                answer = asyncio.wrap_future(engine.stats())
                self.stats = await asyncio.wait_for(answer, self._step_timeout)
            except StokerError:
                return  # it crashed, which `_run_once` reports
            except TimeoutError:
                reason = f"it gave no sign of life for {self._step_timeout:g} s (--step-timeout)"
                log.error("the engine is killed: %s", reason)
                engine.kill(reason)
                return
            await asyncio.sleep(HEALTH_CHECK_S)

    def _on_loading(self, loading: Loading) -> None:
        """Called from another thread while the engine is built."""
        now = time.monotonic()
        self._told_at = self._told_at or now
        began = self.phase.began_at if self._loading == loading.phase else now
        if self.phase.name in ("starting", "restarting", *LOADING):
            self._loading = loading.phase
            verb = loading.phase.partition(" ")[0]
            name = "restarting" if self.starts > 1 else verb if verb in LOADING else "loading"
            detail = ", ".join(filter(None, [loading.phase, loading.amount]))
            self.phase = Phase(name, detail, loading.percent, began)
            if began == now or now - self._said_at > SAY_S:
                self._said_at = now
                log.info("%s", detail)

    def _enter(self, name: str, detail: str = "") -> None:
        if self.phase.name != "stopping":
            self.phase = Phase(name, detail, began_at=time.monotonic())


def _age() -> float:
    """Seconds since this program was started."""
    import psutil

    return max(0.0, time.time() - float(psutil.Process().create_time()))
