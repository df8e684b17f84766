"""Many requests on one model: chunked prefill beside decode, drafting, exact verification.

`step` advances everything by one step and returns events; whoever calls it owns the loop. Tokens of a request do not
depend on what runs beside it, on drafting, or on preemption.
"""

import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

import torch

from stoker.backends.cpu.decoder import Decoder
from stoker.backends.family import CHUNK, PAGE_SIZE, Family
from stoker.engine.backend import Backend, States, StepRunner
from stoker.engine.block import Block, forced_room
from stoker.engine.config import EngineConfig, check_request
from stoker.engine.drafting import Drafting, depth_limit
from stoker.engine.flat import Part
from stoker.engine.memory import new_cache, tensor_bytes
from stoker.engine.outcome import Emitted
from stoker.engine.request import AUTO, Depth, Event, Finish, Sequence
from stoker.engine.runner import Runner
from stoker.engine.scheduler import Scheduler
from stoker.engine.stats import EngineStats, Totals
from stoker.engine.text import TextStream
from stoker.errors import RequestError
from stoker.sampling.mask import RemoteMask, TokenMask, wait_for
from stoker.sampling.sampler import Past, Row
from stoker.sampling.settings import Sampling, are_whole
from stoker.speculate.drafter import Drafter

# How long a step waits for the next of its grammar masks, which take 0.1 ms or so; later ones miss the step. The second
# if there is nothing else to do: then only commands wait.
MASKS_S, MASKS_ALONE_S = 0.005, 0.05
MAX_ROWS = 128  # of one step's forward: up to here a row's bits do not depend on how many ride along

__all__ = ["Engine", "EngineConfig", "check_request"]


class Engine:
    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        drafter: Drafter | None = None,
        tokenizer: Any = None,
        backend: Backend | None = None,
    ) -> None:
        """`tokenizer` is one of the `tokenizers` package; only requests with stop strings need it. Without a `backend`
        the model itself computes, where its weights lie."""
        self.model, self.config, self.drafter, self._tokenizer = model, config, drafter, tokenizer
        weight = model.embed_tokens.weight
        self._vocab_size = model.config.vocab_size
        if backend:
            self._cache: States = backend.cache
        else:
            self._cache = cache = new_cache(model.config, config, weight.dtype, weight.device)
        self.scheduler = Scheduler(config, self._cache, drafter, model.config.max_positions, weight.device)
        self._runner: StepRunner = (
            backend.runner(self.scheduler) if backend else Runner(model, cache, drafter, self.scheduler)
        )
        self._drafting = Drafting(model, drafter, config.max_depth, self._runner.distinct_experts) if drafter else None
        self._cache_bytes = tensor_bytes(self._cache.layers) + self.scheduler.snapshot_bytes
        self._totals = Totals()
        self._next_id = 0

    @property
    def idle(self) -> bool:
        return not self.scheduler.waiting and not self.scheduler.running

    def submit(
        self,
        prompt: Many[int],
        sampling: Sampling,
        depth: Depth = 0,
        boundaries: Iterable[int] = (),
        mask: TokenMask | None = None,
    ) -> int:
        """Queues a request and returns its id; refuses what could never be served, with the numbers.

        `boundaries` are positions where messages of the prompt begin: good places for the prefix cache to start from.
        """
        self._check(prompt, sampling, depth)
        boundaries = list(boundaries)
        if not are_whole(boundaries):
            raise RequestError(f"boundaries are {boundaries}, expected whole numbers, positions in the prompt.")
        if depth == AUTO and self._drafting:
            self._drafting.adapt()
        sequence = Sequence(
            self._next_id,
            list(prompt),
            sampling,
            depth,
            mask=mask,
            text=TextStream(self._tokenizer, sampling.stop) if sampling.stop else None,
            past=Past(self._vocab_size, prompt) if sampling.penalizes else None,
            checkpoints=self.scheduler.prefixes.wanted(prompt, boundaries),
            submitted_at=time.perf_counter(),
        )
        self._next_id += 1
        self.scheduler.add(sequence)
        return sequence.id

    def cancel(self, request_id: int) -> Event | None:
        """Frees everything the request holds at once. None if it is not here (any more)."""
        sequence = self.scheduler.find(request_id)
        return self._end(sequence, Event(request_id, (), Finish.CANCELLED)) if sequence else None

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One verify step of everything that decodes, then one prefill batch within the budget."""
        self.scheduler.admit(time.perf_counter())
        self._await_masks()
        events = self._verify()
        return events + self._prefill()

    def shed(self) -> int:
        """Gives up the prefix cache. Returns the bytes that went back to the system; on accelerators there are none,
        their memory was reserved at the start and stays so."""
        return self.scheduler.shed()

    def stats(self) -> EngineStats:
        controller = self._drafting.controller if self._drafting else None
        return EngineStats.of(self._totals, self.scheduler, self._cache_bytes, controller)

    def check_integrity(self) -> None:
        """Every page and slot is free, or its owners among requests and checkpoints are on record."""
        self.scheduler.check_integrity()

    def _await_masks(self) -> None:
        """Asks for the masks of everything that runs. Who is late misses this step, which changes no token."""
        asked = [sequence for sequence in self.scheduler.running if isinstance(sequence.mask, RemoteMask)]
        for sequence in asked:
            assert isinstance(sequence.mask, RemoteMask)
            sequence.mask.ask(sequence.output, room=forced_room(sequence, self.config.window))
        busy = len(asked) < len(self.scheduler.running) or any(_mask_ready(sequence) for sequence in asked)
        masks = [sequence.mask for sequence in asked if isinstance(sequence.mask, RemoteMask)]
        wait_for(masks, MASKS_S if busy else MASKS_ALONE_S)

    def _check(self, prompt: Many[int], sampling: Sampling, depth: Depth) -> None:
        check_request(self.model.config, prompt, sampling)
        if isinstance(depth, str) and depth != AUTO:
            raise RequestError(f"depth is {depth!r}, expected {AUTO!r} or 0 to {self.config.max_depth}.")
        if depth != AUTO and not (are_whole([depth]) and 0 <= depth <= self.config.max_depth):
            raise RequestError(f"depth is {depth}, expected 0 to {self.config.max_depth}.")
        if depth and self.drafter is None:
            raise RequestError(f"depth is {depth}, but this engine has no drafter.")
        if sampling.stop and self._tokenizer is None:
            raise RequestError(
                f"stop asks for {len(sampling.stop)} stop strings, but this engine has no tokenizer to find them with. "
                "Give it one, or use stop_ids."
            )
        need, room = len(prompt) + sampling.max_tokens, self.config.pages * PAGE_SIZE
        if need > room:
            raise RequestError(
                f"prompt has {len(prompt):,} tokens and max_tokens asks {sampling.max_tokens:,}: "
                f"{need:,} > {room:,} tokens of KV cache. Give the engine more pages or ask for less."
            )

    # -- prefill

    def _prefill(self) -> list[Event]:
        events: list[Event] = []
        parts: list[Part] = []
        first_rows: dict[int, Row] = {}
        budget = self.config.prefill_budget
        for sequence in list(self.scheduler.running):
            family, end = sequence.stretch()
            if family is not Family.PREFILL or not budget:
                continue
            # chunks end at multiples of 64 or with the stretch, so that chunking never shows in the bits
            stop = min(end, (sequence.computed + budget) // CHUNK * CHUNK)
            stop = min([stop, *(place for place in sequence.checkpoints if place > sequence.computed)])
            if stop <= sequence.computed:
                break
            if stop == len(sequence.prompt) and not sequence.output:  # a preempted request has its first token
                if not _mask_ready(sequence):
                    continue
                try:
                    first_rows[sequence.id] = self._first_row(sequence)
                except RequestError as error:
                    events.append(self._fail(sequence, error))
                    continue
            parts.append(Part(sequence, sequence.tokens[sequence.computed : stop]))
            budget -= stop - sequence.computed
        if not parts:
            return events
        emitted = self._runner.prefill(parts, first_rows)
        self._totals.prefill_tokens += sum(len(part.tokens) for part in parts)
        for sequence, _ in emitted:
            sequence.first_token_at = time.perf_counter()
            assert sequence.admitted_at is not None
            sequence.stats.prefill_s = sequence.first_token_at - sequence.admitted_at
        return events + self._close(emitted)

    def _first_row(self, sequence: Sequence) -> Row:
        """The row that chooses a request's first token. Raises RequestError if its mask fails."""
        return Block.decoding(sequence, self._vocab_size, window=1).rows()[0]

    # -- decode

    def _verify(self) -> list[Event]:
        started = time.perf_counter()
        blocks, events = self._blocks()
        if not blocks:
            return events
        if self._drafting:
            self._drafting.propose(blocks)
        emitted: Emitted = []
        for group in _groups(blocks):
            emitted += self._runner.verify(group)
        self._totals.steps += 1
        self._totals.step_s += time.perf_counter() - started
        self._totals.step_tokens += sum(len(block.tokens) for block in blocks)
        if self._drafting:
            made = {sequence.id: event.tokens for sequence, event in emitted}
            self._drafting.observe(blocks, made, time.perf_counter() - started)
        return events + self._close(emitted)

    def _blocks(self) -> tuple[list[Block], list[Event]]:
        """What each running sequence brings to the step, with pages for it, and the end of those whose mask failed."""
        blocks: list[Block] = []
        events: list[Event] = []
        for sequence in list(self.scheduler.running):
            family, stop = sequence.stretch()
            if sequence.slot < 0 or family is not Family.STEP:  # an older request may just have pushed it out
                continue
            if not sequence.decoding:
                blocks.append(Block.replaying(sequence, min(stop, sequence.computed + self.config.window)))
                continue
            if not _mask_ready(sequence):
                continue
            try:
                block = Block.decoding(sequence, self._vocab_size, self.config.window)
            except RequestError as error:
                events.append(self._fail(sequence, error))
                continue
            reach = len(block.drafts) if block.forced else depth_limit(sequence, self.config.max_depth)
            if self.scheduler.make_room(sequence, sequence.length + reach):
                blocks.append(block)
        return blocks, events

    def _close(self, emitted: Emitted) -> list[Event]:
        """Lets go of requests that have ended, with their stats in the last event."""
        return [self._end(sequence, event) if event.finish else event for sequence, event in emitted]

    def _fail(self, sequence: Sequence, error: RequestError) -> Event:
        return self._end(sequence, Event(sequence.id, (), Finish.ERROR, error=str(error)))

    def _end(self, sequence: Sequence, event: Event) -> Event:
        assert event.finish is not None
        self.scheduler.remove(sequence)
        if isinstance(sequence.mask, RemoteMask):
            sequence.mask.close()
        if self._drafting:
            self._drafting.forget(sequence)
        stats = sequence.stats
        stats.output_tokens = len(sequence.output)
        if sequence.first_token_at is not None:
            stats.decode_s = time.perf_counter() - sequence.first_token_at
        self._totals.add(stats, event.finish)
        return replace(event, stats=stats)


def _mask_ready(sequence: Sequence) -> bool:
    return not isinstance(sequence.mask, RemoteMask) or sequence.mask.ready(sequence.output)


def _groups(blocks: list[Block]) -> Iterator[list[Block]]:
    """Blocks of one step in forwards of at most MAX_ROWS tokens."""
    group: list[Block] = []
    rows = 0
    for block in blocks:
        if group and rows + len(block.tokens) > MAX_ROWS:
            yield group
            group, rows = [], 0
        group.append(block)
        rows += len(block.tokens)
    yield group
