"""The engine process from the server's side: loading, being ready, dying, being started again."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from stoker.engine.stats import EngineStats
from stoker.engine.worker.messages import Loading
from stoker.engine.worker.process import EngineProcess
from stoker.engine.worker.spec import Buildable
from stoker.errors import EngineError, StokerError

log = logging.getLogger("stoker.server")

WATCH_S = 0.5  # how often the engine is asked how it is
BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)  # before each start after a fall; the last one from then on
STEADY_S = 60.0  # after which a fall is no longer put down to the one before


@dataclass
class Phase:
    """Where the engine stands, for /ready and for people who wait."""

    name: str  # starting, loading, self-test, ready, restarting, stopping, failed
    detail: str = ""
    percent: int | None = None
    began_at: float = 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds left of this phase, if it went on as it began."""
        if not self.percent:
            return None
        return (time.monotonic() - self.began_at) * (100 - self.percent) / self.percent


class Supervisor:
    """`run` is the engine's whole life; it returns when the engine is not to be started again."""

    def __init__(
        self, spec: Buildable, step_timeout: float, test: Callable[[EngineProcess], Awaitable[None]] | None = None
    ) -> None:
        """`test` is awaited each time an engine is up, before it counts as ready; a StokerError of its is final."""
        self._spec, self._step_timeout, self._test = spec, step_timeout, test
        self.phase = Phase("starting", began_at=time.monotonic())
        self.engine: EngineProcess | None = None
        self.stats: EngineStats | None = None  # the latest
        self.starts = 0
        self.fault: str | None = None  # why the last engine fell
        self.on_fall: Callable[[str], object] = lambda reason: None

    @property
    def ready(self) -> bool:
        return self.phase.name == "ready" and self.engine is not None and self.engine.alive

    @property
    def healthy(self) -> bool:
        """Red from a crash until the next engine is ready; loading for the first time is no illness."""
        first = self.starts <= 1 and self.phase.name in ("starting", "loading", "self-test", "stopping")
        return first or self.ready

    async def run(self) -> None:
        """Starts the engine, and again whenever it falls. Raises what makes a first start hopeless."""
        falls, since = 0, time.monotonic()
        while True:
            try:
                await self._live()
            except StokerError as error:
                if self.starts == 1 and not isinstance(error, EngineError):
                    self._set("failed", str(error))
                    raise
                reason = str(error)
            if self.phase.name == "stopping":
                return
            falls = falls + 1 if time.monotonic() - since < STEADY_S else 1
            self.fault, since = reason, time.monotonic()
            self.stats = None
            self._set("restarting", reason)
            log.error("%s", reason)
            self.on_fall(reason)
            await asyncio.sleep(BACKOFF_S[min(falls - 1, len(BACKOFF_S) - 1)])

    async def stop(self) -> None:
        """Ends the engine now."""
        self._set("stopping")
        if self.engine:
            await asyncio.to_thread(self.engine.close)

    async def _live(self) -> None:
        """One life of the engine. Raises what it died of."""
        self.starts += 1
        if self.engine is None:
            self._set("loading")
            self.engine = EngineProcess(self._spec, self._heard)
        else:
            await asyncio.to_thread(self.engine.restart)
        engine = self.engine
        ready = await asyncio.wrap_future(engine.ready)
        for note in ready.notes:
            log.info("note: %s", note)
        watch = asyncio.create_task(self._watch(engine))
        try:
            if self._test:
                self._set("self-test")
                await self._test(engine)
            self._set("ready")
            self.fault = None
            raise await asyncio.wrap_future(engine.fallen)
        finally:
            watch.cancel()

    async def _watch(self, engine: EngineProcess) -> None:
        """Keeps `stats` fresh. An engine that does not answer within a step's worth of patience hangs."""
        while True:
            try:
                answer = asyncio.wrap_future(engine.stats())
                self.stats = await asyncio.wait_for(answer, self._step_timeout)
            except StokerError:
                return  # it fell, and `_live` knows
            except TimeoutError:
                reason = f"it gave no sign of life for {self._step_timeout:g} s (--step-timeout)"
                log.error("the engine is killed: %s", reason)
                engine.kill(reason)
                return
            await asyncio.sleep(WATCH_S)

    def _heard(self, loading: Loading) -> None:
        """From a thread, while weights are read."""
        began = self.phase.began_at if self.phase.detail == loading.phase else time.monotonic()
        if self.phase.name in ("starting", "loading", "restarting"):
            name = "loading" if self.starts <= 1 else "restarting"
            self.phase = Phase(name, loading.phase, loading.percent, began)

    def _set(self, name: str, detail: str = "") -> None:
        if self.phase.name != "stopping":
            self.phase = Phase(name, detail, began_at=time.monotonic())
