"""What all endpoints share: the model, the engine, who may come in, and everything that is under way."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from stoker.engine.config import check_request
from stoker.engine.request import AUTO, Depth
from stoker.engine.worker import heap
from stoker.engine.worker.process import EngineProcess
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
REST_S, WORK_S = 3.0, 0.2  # how often it is seen whether all rests, and what CPU time makes freed memory worth a look
THREADS = 32  # that read requests; at most half of them wait for schemas to be checked (prepare/grammar_check.py)


class Service:
    def __init__(self, config: ServerConfig, plan: Plan, spec: Buildable) -> None:
        self.config, self.plan, self.context = config, plan, plan.context
        self.choice = DraftChoice.parse(config.draft)
        self.depth: Depth = AUTO if self.choice.adaptive else self.choice.depth
        self.metrics = Metrics(config.names[0])
        self.supervisor = Supervisor(spec, config.step_timeout, self._test if config.self_test else None)
        self.supervisor.on_fall = lambda reason: self.metrics.restarts.inc()
        self.live: set[Generation] = set()
        self.draining = False
        self._model: ServedModel | None = None
        self._loaded = asyncio.Event()
        self.started_at = int(time.time())
        self.failure: StokerError | None = None  # why the server had to end
        self.on_end: Callable[[str], object] = lambda reason: None
        # of the host: a card's own memory is all taken at the start
        reserve = plan.reserve if config.reserve is not None else read_memory().reserve
        self.memory = MemoryGuard(read_memory, reserve, self._shed_cache, self.abort_waiting, self._give_up)
        self.metrics.watch(self._gauges)

    @property
    def model(self) -> ServedModel:
        """Only once it is loaded; until then requests are told how far it is."""
        if self._model is None:
            self.check_ready()
            raise ApiError(503, "The tokenizer is being loaded. Try again soon.", retry_after=RETRY_S)
        return self._model

    async def run(self) -> None:
        """Loads model and engine, and keeps the engine alive until it is stopped."""
        config = self.config
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "stoker-requests"))
        loading = asyncio.to_thread(
            ServedModel, config.directory, config.names, self.context, dict(config.template_options), config.any_model
        )
        async with asyncio.TaskGroup() as group:
            supervising = group.create_task(self.supervisor.run())
            watching = group.create_task(self.memory.run())
            resting = group.create_task(self._rest())
            self._model = await loading
            heap.freeze_loaded()
            self._loaded.set()
            await supervising
            watching.cancel()
            resting.cancel()

    async def _rest(self) -> None:
        """Freed memory goes back to the system once nothing is under way."""
        trimmed = 0.0
        while True:
            await asyncio.sleep(REST_S)
            if not self.live and time.process_time() - trimmed > WORK_S:
                await asyncio.to_thread(heap.trim)
                trimmed = time.process_time()

    async def _test(self, engine: EngineProcess) -> None:
        await self._loaded.wait()
        assert self._model is not None
        await self_test(engine, self._model, self.choice, self.plan)

    def ended(self, running: "asyncio.Task[None]") -> None:
        """`run` is over. If it was not told to be, the server cannot go on."""
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

    # -- who may come in

    @property
    def ready(self) -> bool:
        return self.supervisor.ready and self._model is not None and not self.draining

    def check_ready(self) -> None:
        """Raises 503 with how long it may take."""
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
        """Raises where a request cannot be taken now; `count` is the number of answers it asks for."""
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
        """Raises 400, with the numbers, for what could never be served."""
        try:
            check_request(self.model.config, request.prompt, request.sampling)
        except StokerError as error:
            raise api_error(error) from error

    def room_for_answer(self, prompt: list[int]) -> int:
        """Tokens left of the context after a prompt. Raises 400 where there are none, in words that agents look for
        to shorten a conversation (so the numbers have no commas)."""
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

    # -- what is under way

    def submit(self, requests: list[EngineRequest], arrived_at: float) -> "Submission":
        """Hands checked requests to the engine, all or none. Raises where there is no room for them."""
        self.admit(len(requests))
        engine = self.supervisor.engine
        assert engine is not None
        submission = Submission(self)
        try:
            for request in requests:
                stream = engine.submit(request.prompt, request.sampling, self.depth, request.boundaries, request.mask)
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
        """Turns away what has no token yet. Returns how many those were."""
        waiting = [generation for generation in self.live if not generation.started]
        for generation in waiting:
            generation.abort(EngineError(reason))
        return len(waiting)

    # -- when memory runs short

    def _shed_cache(self) -> None:
        engine = self.supervisor.engine
        if engine and engine.alive:
            self.metrics.shed_caches.inc()
            engine.release_memory()

    def _give_up(self, reason: str) -> None:
        self.failure = StokerError(reason)
        self.abort_all(reason)
        self.on_end(reason)

    # -- gauges

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        yield "stoker:ready", "1 when requests are answered.", float(self.ready)
        yield "stoker:healthy", "0 from a crash of the engine until it is up again.", float(self.supervisor.healthy)
        yield "stoker:requests_live", "Requests that the server has not finished with.", len(self.live)
        yield "stoker:context_tokens", "Most tokens of one request.", self.context
        if self.memory.latest:
            yield "stoker:memory_available_bytes", "What the system could still give.", self.memory.latest.available
        yield "stoker:kv_bytes", "Bytes of KV pages, the drafter's included.", self.plan.kv_bytes
        yield "stoker:state_bytes", "Bytes of recurrent states, kept ones included.", self.plan.state_bytes
        yield "stoker:memory_reserve_bytes", "What should stay free.", self.plan.reserve
        stats = self.supervisor.stats
        if stats:
            yield from engine_gauges(stats)


class Submission:
    """Answers of one request under way. `close` cancels what is still running of them."""

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
