"""Many requests on one model: chunked prefill beside decode, drafting, exact verification.

`step` advances everything by one step and returns events; whoever calls it owns the loop, and an accelerator computes
the next step while the caller is busy with them. Tokens of a request do not depend on what runs beside it, on drafting,
or on preemption.
"""

import time
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from stoker.backends.family import PAGE_SIZE
from stoker.engine.backend import Backend
from stoker.engine.config import EngineConfig, check_request
from stoker.engine.drafting import Drafting
from stoker.engine.event import AUTO, Depth, EngineStats, Event, Finish, Totals
from stoker.engine.outcome import Emitted, emit, following, score_prompt, settle
from stoker.engine.request import Request
from stoker.engine.scheduler import Failed, Scheduler
from stoker.engine.step import Chunk, StepTokens, forced_room
from stoker.engine.text import TextStream
from stoker.errors import RequestError
from stoker.sampling.mask import RemoteMask, TokenMask, wait_for
from stoker.sampling.sampler import Past
from stoker.sampling.settings import Sampling, are_whole
from stoker.speculate.assumed import AssumedAcceptance
from stoker.speculate.drafter import Drafter

# How long a step waits for the next of its grammar masks, which take 0.1 ms or so; later ones miss the step. The second
# if there is nothing else to do: then only commands wait.
MASKS_S, MASKS_ALONE_S = 0.005, 0.05

__all__ = ["Engine", "EngineConfig", "check_request"]


@dataclass(frozen=True)
class StepUnderWay:
    """A verify step whose last forward is being computed."""

    entries: Sequence[StepTokens]
    group: Sequence[StepTokens]  # those of the last forward
    made: dict[int, Sequence[int]]  # tokens of requests by the forwards before it
    started: float


class Engine:
    def __init__(
        self, config: EngineConfig, backend: Backend, drafter: Drafter | None = None, tokenizer: Any = None
    ) -> None:
        """`backend` and `drafter` were made for `config`. `tokenizer` is one of the `tokenizers` package; only requests
        with stop strings need it."""
        self.config, self.backend, self.drafter, self._tokenizer = config, backend, drafter, tokenizer
        self.scheduler = Scheduler(config, backend, drafter)
        self._drafting = Drafting(backend, drafter, config.max_depth) if drafter else None
        self._totals = Totals()
        self._under_way: StepUnderWay | None = None
        self._next_id = 0

    @property
    def idle(self) -> bool:
        return not self.scheduler.waiting and not self.scheduler.running

    def submit(
        self,
        prompt: Sequence[int],
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
        request = Request(
            self._next_id,
            list(prompt),
            sampling,
            depth,
            mask=mask,
            text=TextStream(self._tokenizer, sampling.stop) if sampling.stop else None,
            past=Past(self.backend.model.vocab_size, prompt) if sampling.penalizes else None,
            snapshots_at=self.scheduler.prefixes.wanted(prompt, boundaries),
            submitted_at=time.perf_counter(),
        )
        request.stats.assumed_tokens = assumed = self.config.assumed_tokens
        if assumed is not None and mask is None:  # what a grammar allows is looked at
            request.assumed = AssumedAcceptance(assumed, request.id)
        self._next_id += 1
        self.scheduler.add(request)
        return request.id

    def cancel(self, request_id: int) -> Event | None:
        """Frees everything the request holds at once. None if it is not here (any more)."""
        request = self.scheduler.find(request_id)
        if request is None:
            return None
        event = self._end(request, Event(request_id, (), Finish.CANCELLED))
        if self.idle:
            self._end_step()  # nobody would ask for it
        return event

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Ends the verify step under way, computes one prefill batch within the budget, and begins the next verify step
        of everything that decodes."""
        events = self._end_step()
        self.scheduler.admit(time.perf_counter())
        self._await_masks()
        events += self._prefill()
        self._await_masks()  # of those that have their first token now
        return events + self._begin_step()

    def release_memory(self) -> int:
        """Gives up the prefix cache. Returns the bytes that went back to the system; on accelerators there are none,
        their memory was reserved at the start and stays so."""
        return self.scheduler.release_memory()

    def stats(self) -> EngineStats:
        scheduler, controller = self.scheduler, self._drafting.controller if self._drafting else None
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages=scheduler.pages.size,
            pages_used=scheduler.pages.size - scheduler.pages.free,
            pages_cached=scheduler.pages.reclaimable,
            slots=scheduler.slots.size,
            slots_used=scheduler.slots.size - scheduler.slots.free,
            snapshots=len(scheduler.prefixes),
            cache_bytes=self.backend.cache_bytes,
            preemptions=scheduler.preemptions,
            totals=deepcopy(self._totals),
            depth_controller=controller.stats() if controller else None,
        )

    def check_integrity(self) -> None:
        """Every page and slot is free, or its owners among requests and snapshots are on record."""
        self.scheduler.check_integrity()

    def _await_masks(self) -> None:
        """Asks for the masks of everything that runs. Who is late misses this step, which changes no token."""
        masks = []
        for request in self.scheduler.running:
            if isinstance(request.mask, RemoteMask):
                request.mask.ask(request.output, room=forced_room(request, self.config.window))
                masks.append(request.mask)
        if masks:
            busy = len(masks) < len(self.scheduler.running) or any(each.mask_ready for each in self.scheduler.running)
            wait_for(masks, MASKS_S if busy else MASKS_ALONE_S)

    def _check(self, prompt: Sequence[int], sampling: Sampling, depth: Depth) -> None:
        check_request(self.backend.model, prompt, sampling)
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
        chunks, failed = self.scheduler.next_chunks()
        events = self._failures(failed)
        for group in self.backend.prompt_groups(chunks):
            events += self._close(self._prefill_group(group))
        return events

    def _prefill_group(self, chunks: Sequence[Chunk]) -> Emitted:
        """Computes chunks; requests whose prompt ends here get their first token."""
        backend = self.backend
        started = time.perf_counter()
        backend.prefill(chunks)
        for index, chunk in enumerate(chunks):
            if chunk.request.scores_prompt:
                score_prompt(chunk.request, len(chunk.tokens), partial(backend.prompt_logits, index))
        for chunk in chunks:
            chunk.request.prefilled(len(chunk.tokens))
            self._totals.prefill_tokens += len(chunk.tokens)
        emitted: Emitted = []
        ending = [chunk.request for chunk in chunks if chunk.first is not None]
        if ending:
            choices = backend.first_tokens()
            for request, token, row in zip(ending, choices.tokens, choices.firsts, strict=True):
                emitted.append((request, emit(request, [token], choices.logits, row)))
        else:
            backend.wait()
        self.scheduler.pace.took(sum(len(chunk.tokens) for chunk in chunks), time.perf_counter() - started)
        backend.observe(following([chunk.request for chunk in chunks], [len(chunk.tokens) for chunk in chunks]))
        for chunk in chunks:
            self.scheduler.keep_prompt(chunk.request)
        for request in ending:
            request.first_token_at = time.perf_counter()
            assert request.admitted_at is not None
            request.stats.prefill_s = request.first_token_at - request.admitted_at
        return emitted

    # -- decode

    def _begin_step(self) -> list[Event]:
        """Drafts and verifies; requests whose mask failed end here."""
        started = time.perf_counter()
        entries, failed = self.scheduler.next_step()
        events = self._failures(failed)
        if not entries:
            return events
        if self._drafting:
            self._drafting.propose(entries)
        made: dict[int, Sequence[int]] = {}
        *before, last = self.backend.step_groups(entries)
        for group in before:
            self.backend.step(group)
            events += self._settle(group, made)
        self.backend.step(last)
        self._under_way = StepUnderWay(entries, last, made, started)
        return events

    def _end_step(self) -> list[Event]:
        """Waits for the step under way, if there is one."""
        step, self._under_way = self._under_way, None
        if step is None:
            return []
        events = self._settle(step.group, step.made)
        seconds = time.perf_counter() - step.started
        self._totals.steps += 1
        self._totals.step_s += seconds
        self._totals.step_tokens += sum(len(entry.tokens) for entry in step.entries)
        if self._drafting:
            self._drafting.observe(step.entries, step.made, seconds)
        return events

    def _settle(self, entries: Sequence[StepTokens], made: dict[int, Sequence[int]]) -> list[Event]:
        """What the forward that was begun last means for its requests; their tokens go into `made`."""
        emitted, kept = settle(entries, self.backend.choices())
        requests = [entry.request for entry in entries]
        self.backend.observe(following(requests, kept))
        for request, count in zip(requests, kept, strict=True):
            if count and request.computed > len(request.prompt):
                self.scheduler.keep_output(request)
        made |= {request.id: event.tokens for request, event in emitted}
        return self._close(emitted)

    def _close(self, emitted: Emitted) -> list[Event]:
        """Lets go of requests that have ended, with their stats in the last event."""
        return [self._end(request, event) if event.finish else event for request, event in emitted]

    def _failures(self, failed: Iterable[Failed]) -> list[Event]:
        """The last events of requests that the scheduler has let go already."""
        return [self._finish(each, Event(each.id, (), Finish.ERROR, error=str(error))) for each, error in failed]

    def _end(self, request: Request, event: Event) -> Event:
        self.scheduler.remove(request)
        return self._finish(request, event)

    def _finish(self, request: Request, event: Event) -> Event:
        assert event.finish is not None
        if isinstance(request.mask, RemoteMask):
            request.mask.close()
        if self._drafting:
            self._drafting.forget(request)
        stats = request.stats
        stats.output_tokens = len(request.output)
        if request.first_token_at is not None:
            stats.decode_s = time.perf_counter() - request.first_token_at
        self._totals.add(stats, event.finish)
        return replace(event, stats=stats)
