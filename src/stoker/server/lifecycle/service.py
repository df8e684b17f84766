"""What all endpoints share: the model, the engine, admission control and the requests in progress."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from stoker.engine.config import check_request
from stoker.engine.event import AUTO, Depth
from stoker.engine.worker import heap
from stoker.engine.worker.process import EngineProcess, PreparedProcess
from stoker.engine.worker.spec import Buildable
from stoker.errors import EngineError, StokerError
from stoker.server.config import ServerConfig
from stoker.server.errors import RETRY_S, ApiError, api_error
from stoker.server.generation import EngineRequest, Generation
from stoker.server.lifecycle.memory_guard import MemoryGuard, read_memory
from stoker.server.lifecycle.plan import Plan
from stoker.server.lifecycle.self_test import self_test
from stoker.server.lifecycle.supervisor import Supervisor
from stoker.server.metrics import Metrics, engine_gauges
from stoker.server.model import ServedModel
from stoker.speculate.choice import DraftChoice

log = logging.getLogger("stoker.server")
IDLE_CHECK_S = 3.0  # interval of idle checks
TRIM_CPU_S = 0.2  # CPU time after which trimming the heap is worthwhile
THREADS = 32  # that prepare requests; at most half of them wait for grammar checks (prepare/grammar_check.py)


class Service:
    def __init__(
        self, config: ServerConfig, plan: Plan, spec: Buildable, prepared: PreparedProcess | None = None
    ) -> None:
        self.config, self.plan, self.context = config, plan, plan.context
        self.choice = DraftChoice.parse(config.draft)
        self.depth: Depth = AUTO if self.choice.adaptive else self.choice.depth
        self.metrics = Metrics(config.names[0])
        test = self._self_test if config.self_test else None
        self.supervisor = Supervisor(spec, config.step_timeout, test, prepared)
        self.supervisor.on_crash = lambda reason: self.metrics.restarts.inc()
        self.live: set[Generation] = set()
        self.draining = False
        self._model: ServedModel | None = None
        self._loaded = asyncio.Event()
        self.started_at = int(time.time())
        self.failure: StokerError | None = None  # why the server had to stop
        self.on_end: Callable[[str], object] = lambda reason: None
        # of the host: the memory of a GPU is allocated as a whole at the start
        reserve = plan.reserve if config.reserve is not None else plan.reading.host_reserve
        self.memory = MemoryGuard(read_memory, reserve, self._evict_cache, self.abort_waiting, self._stop_for_memory)
        self.metrics.watch(self._gauges)

    @property
    def model(self) -> ServedModel:
        """The model. Raises 503, with the progress of loading, until it is loaded."""
        if self._model is None:
            self.check_ready()
            raise ApiError(503, "The tokenizer is being loaded. Try again soon.", retry_after=RETRY_S)
        return self._model

    async def run(self) -> None:
        """Loads the model and supervises the engine until the server stops."""
        config = self.config
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "stoker-requests"))
        loading = asyncio.to_thread(
            ServedModel,
            config.directory,
            config.names,
            self.context,
            dict(config.template_options),
            config.any_model,
            config.sampling,
        )
        async with asyncio.TaskGroup() as group:
            supervising = group.create_task(self.supervisor.run())
            watching = group.create_task(self.memory.run())
            trimming = group.create_task(self._trim_when_idle())
            self._model = await loading
            heap.freeze_loaded()
            self._loaded.set()
            await supervising
            watching.cancel()
            trimming.cancel()

    async def _trim_when_idle(self) -> None:
        """Returns freed memory to the system whenever the server is idle."""
        trimmed = 0.0
        while True:
            await asyncio.sleep(IDLE_CHECK_S)
            if not self.live and time.process_time() - trimmed > TRIM_CPU_S:
                await asyncio.to_thread(heap.trim)
                trimmed = time.process_time()

    async def _self_test(self, engine: EngineProcess) -> None:
        await self._loaded.wait()
        assert self._model is not None
        await self_test(engine, self._model, self.choice, self.plan)

    def ended(self, running: "asyncio.Task[None]") -> None:
        """Called when `run` ends. If it failed, the server cannot go on and stops."""
        error = None if running.cancelled() else running.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is None:
            return
        self.failure = error if isinstance(error, StokerError) else EngineError(f"{type(error).__name__}: {error}")
        if not isinstance(error, StokerError):
            log.error("the server cannot go on", exc_info=error)
        self.abort_all(str(self.failure))
        self.on_end(str(self.failure))

    # -- admission

    @property
    def ready(self) -> bool:
        return self.supervisor.ready and self._model is not None and not self.draining

    def check_ready(self) -> None:
        """Raises 503, with the expected time, if requests are not accepted now."""
        if self.draining:
            raise ApiError(503, "The server is shutting down and takes no more requests.", retry_after=10)
        if self.ready:
            return
        phase = self.supervisor.phase
        eta = phase.eta_s
        if self.supervisor.starts > 1:
            fault = f" after a fault ({self.supervisor.fault})" if self.supervisor.fault else ""
            message = f"The engine is being started again{fault}. Try again soon."
        else:
            share = f", {phase.percent} % done" if phase.percent is not None else ""
            message = f"The model is not loaded yet ({phase.detail or phase.name}{share}). Try again soon."
        retry = RETRY_S if eta is None else max(1, math.ceil(eta))
        raise ApiError(503, message, code="not_ready", retry_after=retry)

    def admit(self, count: int = 1) -> None:
        """Raises if a request with `count` answers cannot be accepted now."""
        try:
            self.check_ready()
        except ApiError:
            self.metrics.refused("not_ready")
            raise
        if self.memory.short:
            self.metrics.refused("memory")
            raise ApiError(503, "Memory runs short, and new requests are turned away.", code="memory", retry_after=5)
        room = self.config.users + self.config.queue - len(self.live)
        if count > room:
            self.metrics.refused("queue_full")
            raise ApiError(
                429,
                f"{len(self.live)} requests are running or waiting, and {self.config.users} may run and "
                f"{self.config.queue} wait: there is no room for {count} more. Try again later.",
                code="queue_full",
                retry_after=RETRY_S,
            )

    def check(self, request: EngineRequest) -> None:
        """Raises 400, with the numbers, for a request that could never be served."""
        try:
            check_request(self.model.config, request.prompt, request.sampling)
        except StokerError as error:
            raise api_error(error) from error

    def room_for_answer(self, prompt: list[int]) -> int:
        """Tokens of the context that a prompt leaves. If there are none, raises 400 with the wording by which agents
        recognise that they must shorten a conversation; its numbers have no commas for the same reason."""
        room = self.context - len(prompt)
        if room < 1:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.context} tokens. However, the prompt has "
                f"{len(prompt)} tokens, and an answer needs at least 1. Shorten the prompt, or start the server with a "
                "larger --context.",
                code="context_length_exceeded",
                anthropic_message=f"prompt is too long: {len(prompt)} tokens > {self.context - 1} maximum",
            )
        return room

    # -- requests in progress

    def submit(self, requests: list[EngineRequest], arrived_at: float) -> "Submission":
        """Hands requests to the engine, all or none. Raises if there is no room for them."""
        self.admit(len(requests))
        engine = self.supervisor.engine
        assert engine is not None
        submission = Submission(self)
        try:
            for request in requests:
                depth = self.depth if request.drafted else 0
                stream = engine.submit(request.prompt, request.sampling, depth, request.boundaries, request.mask)
                timeout = self.config.request_timeout
                submission.add(Generation(stream, request, self.model, self.metrics, arrived_at, timeout))
        except StokerError as error:
            submission.close()
            raise api_error(error) from error
        return submission

    def abort_all(self, reason: str) -> None:
        for generation in list(self.live):
            generation.abort(EngineError(reason))

    def abort_waiting(self, reason: str) -> int:
        """Aborts requests that have no token yet. Returns their number."""
        waiting = [generation for generation in self.live if not generation.started]
        for generation in waiting:
            generation.abort(EngineError(reason))
        return len(waiting)

    # -- when memory runs short

    def _evict_cache(self) -> None:
        engine = self.supervisor.engine
        if engine and engine.alive:
            self.metrics.cache_evictions.inc()
            engine.release_memory()

    def _stop_for_memory(self, reason: str) -> None:
        self.failure = StokerError(reason)
        self.abort_all(reason)
        self.on_end(reason)

    # -- gauges

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        yield "stoker:ready", "1 when requests are answered.", float(self.ready)
        yield "stoker:healthy", "0 from a crash of the engine until it is up again.", float(self.supervisor.healthy)
        yield "stoker:requests_live", "Requests that the server has not finished with.", len(self.live)
        if self.config.assume_acceptance is not None:
            text = "Tokens a step emits with drafts accepted unseen: for measuring, the text is not the model's."
            yield "stoker:acceptance_assumed", text, self.config.assume_acceptance
        yield "stoker:context_tokens", "Most tokens of one request.", self.context
        if self.memory.latest:
            yield "stoker:memory_available_bytes", "What the system could still give.", self.memory.latest.available
        yield "stoker:kv_bytes", "Bytes of KV pages, the drafter's included.", self.plan.kv_bytes
        yield "stoker:state_bytes", "Bytes of recurrent states, kept ones included.", self.plan.state_bytes
        yield "stoker:memory_reserve_bytes", "What should stay free.", self.memory.reserve
        stats = self.supervisor.stats
        if stats:
            yield from engine_gauges(stats)


class Submission:
    """The answers of one request in progress. `close` cancels those that are still running."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.generations: list[Generation] = []

    @property
    def requests(self) -> list[EngineRequest]:
        return [generation.request for generation in self.generations]

    def add(self, generation: Generation) -> None:
        self.generations.append(generation)
        self._service.live.add(generation)

    def close(self) -> None:
        for generation in self.generations:
            self._service.live.discard(generation)
            generation.close()
