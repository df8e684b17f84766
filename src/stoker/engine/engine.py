"""Many requests on one model: admission, chunked prefill beside decode, drafting, exact verification, preemption.

`step` advances everything by one step and returns events; whoever calls it owns the loop. Tokens of a request do not
depend on what runs beside it, on drafting, or on preemption.
"""

from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.engine.pages import Pool
from stoker.engine.prefix import PrefixCache
from stoker.engine.request import Event, Finish, Sequence
from stoker.errors import RequestError
from stoker.model.batch import Batch, Run
from stoker.model.cache import PAGE_SIZE, Cache, Snapshots
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.ops.family import CHUNK, Family
from stoker.speculate.drafter import Drafter, DraftRequest, accept
from stoker.speculate.sampler import Row, choose
from stoker.speculate.sampling import Sampling


@dataclass(frozen=True)
class EngineConfig:
    pages: int = 128  # of 64 tokens
    slots: int = 8  # requests running at a time
    max_depth: int = 8  # drafts per step
    prefill_budget: int = 512  # prompt tokens per step, a multiple of 64
    checkpoints: int = 0  # recurrent states the prefix cache may keep; 0 turns it off
    checkpoint_interval: int = 1024  # prompt tokens from one to the next, a multiple of 64

    def __post_init__(self) -> None:
        for name in ("prefill_budget", "checkpoint_interval"):
            value = getattr(self, name)
            if value < CHUNK or value % CHUNK:
                raise RequestError(f"{name} is {value}, expected a multiple of {CHUNK}.")


class Engine:
    def __init__(self, model: Decoder, config: EngineConfig, drafter: Drafter | None = None) -> None:
        self.model, self.config, self.drafter = model, config, drafter
        weight = model.embed_tokens.weight
        self._device = weight.device
        self._cache = Cache.allocate(
            model.config,
            pages=config.pages,
            slots=config.slots,
            window=1 + config.max_depth,
            dtype=weight.dtype,
            device=weight.device,
        )
        self._pages, self._slots = Pool(config.pages), Pool(config.slots)
        self._prefixes = PrefixCache(self._pages, config.checkpoints, config.checkpoint_interval)
        self._snapshots = Snapshots.allocate(self._cache, config.checkpoints)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # oldest first
        self._next_id = 0

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def submit(self, prompt: Many[int], sampling: Sampling, depth: int = 0, boundaries: Many[int] = ()) -> int:
        """Queues a request and returns its id; refuses what could never be served, with the numbers.

        `boundaries` are positions where messages of the prompt begin: good places for the prefix cache to start from.
        """
        self._check(prompt, sampling, depth)
        checkpoints = self._prefixes.wanted(prompt, boundaries)
        sequence = Sequence(self._next_id, list(prompt), sampling, depth, checkpoints)
        self._next_id += 1
        self._waiting.append(sequence)
        return sequence.id

    def cancel(self, request_id: int) -> Event | None:
        """Frees everything the request holds at once. None if it is not here (any more)."""
        for sequence in [*self._waiting, *self._running]:
            if sequence.id == request_id:
                self._remove(sequence)
                return Event(request_id, (), Finish.CANCELLED)
        return None

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One verify step of everything that decodes, then one prefill batch within the budget."""
        self._admit()
        events = self._decode()
        return events + self._prefill()

    def check_integrity(self) -> None:
        """Every page and slot is free, or its owners among requests and checkpoints are on record."""
        held = [page for sequence in self._running for page in sequence.pages]
        self._pages.check_integrity([*held, *self._prefixes.pinned()])
        self._prefixes.check_integrity()
        self._slots.check_integrity([sequence.slot for sequence in self._running])
        for sequence in self._waiting:
            assert sequence.slot == -1
            assert not sequence.pages

    # -- admission and memory

    def _check(self, prompt: Many[int], sampling: Sampling, depth: int) -> None:
        check_request(self.model.config, prompt, sampling)
        if not 0 <= depth <= self.config.max_depth:
            raise RequestError(f"depth is {depth}, expected 0 to {self.config.max_depth}.")
        if depth and self.drafter is None:
            raise RequestError(f"depth is {depth}, but this engine has no drafter.")
        need, room = len(prompt) + sampling.max_tokens, self.config.pages * PAGE_SIZE
        if need > room:
            raise RequestError(
                f"prompt has {len(prompt):,} tokens and max_tokens asks {sampling.max_tokens:,}: "
                f"{need:,} > {room:,} tokens of KV cache. Give the engine more pages or ask for less."
            )

    def _admit(self) -> None:
        """First come, first served: the head of the queue waits for room rather than being overtaken."""
        while self._waiting and self._slots.free:
            sequence = self._waiting[0]
            found = self._prefixes.match(sequence.prompt)
            shared = list(found.pages) if found else []
            self._pages.share(shared)  # first of all, so that making room cannot drop them
            need = _pages_for(sequence.length + 1) - len(shared)
            while need > self._pages.free and self._prefixes.evict():
                pass
            if need > self._pages.free:
                self._pages.give_back(shared)
                return
            self._waiting.popleft()
            sequence.slot, sequence.pages = self._slots.take()[0], shared + self._pages.take(need)
            self._cache.reset(sequence.slot)
            if found:
                self._snapshots.restore(self._cache, sequence.slot, found.snapshot)
                sequence.computed = sequence.stats.cached_tokens = found.position
            if self.drafter:
                self.drafter.reset(sequence.slot)
            self._running.append(sequence)

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Pages for `tokens` positions; checkpoints give way, then younger requests. False if it had to go itself."""
        need = _pages_for(tokens) - len(sequence.pages)
        while need > self._pages.free:
            if self._prefixes.evict():
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        if need > 0:
            sequence.pages += self._pages.take(need)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; it will be computed again, prompt as prompt and output as steps."""
        self._remove(sequence)
        sequence.computed = sequence.replay = 0
        sequence.stats.preemptions += 1
        self._waiting.appendleft(sequence)

    def _remove(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            self._running.remove(sequence)
            self._slots.give_back([sequence.slot])
            self._pages.give_back(sequence.pages)
            sequence.slot, sequence.pages = -1, []
        else:
            self._waiting.remove(sequence)

    # -- prefill

    def _prefill(self) -> list[Event]:
        budget, members, runs = self.config.prefill_budget, [], []
        for sequence in self._running:
            end = len(sequence.prompt)
            if sequence.computed >= end or not budget:
                continue
            # chunks end at multiples of 64 or with the prompt, so that chunking never shows in the bits
            stop = min(end, (sequence.computed + budget) // CHUNK * CHUNK)
            stop = min([stop, *(place for place in sequence.checkpoints if place > sequence.computed)])
            if stop <= sequence.computed:
                break
            members.append(sequence)
            runs.append(self._run(sequence, sequence.computed, stop))
            budget -= stop - sequence.computed
        events: list[Event] = []
        if runs:
            batch = Batch.of(Family.PREFILL, runs, PAGE_SIZE, self._device)
            hidden, taps = self._forward(batch)
            done = [s for s, run in zip(members, runs, strict=True) if run.cached + len(run.tokens) == len(s.prompt)]
            fresh = [s for s in done if not s.output]  # a preempted request already has its first token
            if fresh:
                rows = batch.last_rows[[members.index(s) for s in fresh]]
                tokens = choose(self.model.logits(hidden[rows]), [self._row(s) for s in fresh]).tolist()
                events = [self._emit(s, [token]) for s, token in zip(fresh, tokens, strict=True)]
            for sequence, run in zip(members, runs, strict=True):
                sequence.computed += len(run.tokens)
                sequence.stats.prefill_tokens += len(run.tokens)
            self._observe(batch, members, hidden, taps, [len(run.tokens) for run in runs])
            for sequence in members:
                self._keep(sequence)
        self._end(events)
        self._replay_outputs()
        return events

    def _keep(self, sequence: Sequence) -> None:
        """Takes a checkpoint if one belongs here."""
        if sequence.computed in sequence.checkpoints:
            index = self._prefixes.add(sequence.prompt, sequence.computed, sequence.pages)
            if index is not None:
                self._snapshots.save(self._cache, sequence.slot, index)

    def _replay_outputs(self) -> None:
        """After a preemption: tokens made before it are computed again as steps, the family they were made in."""
        for sequence in [s for s in self._running if s.computed >= len(s.prompt) and s.output and not s.decoding]:
            while not sequence.decoding:
                stop = min(sequence.length - 1, sequence.computed + self._cache_window)
                run = self._run(sequence, sequence.computed, stop)
                batch = Batch.of(Family.STEP, [run], PAGE_SIZE, self._device)
                hidden, taps = self._forward(batch)
                sequence.computed, sequence.replay = stop, len(run.tokens)
                self._observe(batch, [sequence], hidden, taps, [len(run.tokens)])

    # -- decode

    def _decode(self) -> list[Event]:
        ready = []
        for sequence in [s for s in self._running if s.decoding]:
            if sequence.slot >= 0 and self._make_room(sequence, sequence.length + self._depth(sequence)):
                ready.append(sequence)
        ready = [s for s in ready if s.slot >= 0]  # an older request may have pushed a younger one out
        if not ready:
            return []
        drafts = self._draft(ready)
        runs = [
            Run([s.output[-1], *guess], s.computed, s.slot, s.pages, s.replay)
            for s, guess in zip(ready, drafts, strict=True)
        ]
        batch = Batch.of(Family.STEP, runs, PAGE_SIZE, self._device)
        hidden, taps = self._forward(batch)
        rows = [
            self._row(s, guess[:place])
            for s, guess in zip(ready, drafts, strict=True)
            for place in range(len(guess) + 1)
        ]
        targets = choose(self.model.logits(hidden), rows).tolist()
        events, kept, start = [], [], 0
        for sequence, guess in zip(ready, drafts, strict=True):
            emitted = accept(guess, targets[start : start + len(guess) + 1])
            start += len(guess) + 1
            events.append(self._emit(sequence, emitted))
            count = len(events[-1].tokens)  # a stop inside the block cuts it short
            sequence.computed += count
            sequence.replay = count
            sequence.stats.steps += 1
            sequence.stats.drafted += len(guess)
            sequence.stats.accepted += min(count, len(guess), len(emitted) - 1)
            kept.append(count)
        self._observe(batch, ready, hidden, taps, kept)
        self._end(events)
        return events

    def _draft(self, ready: list[Sequence]) -> list[list[int]]:
        if self.drafter is None:
            return [[] for _ in ready]
        requests = [DraftRequest(s.slot, s.pages, s.prompt, s.output, s.sampling, self._depth(s)) for s in ready]
        return [guess[: r.depth] for guess, r in zip(self.drafter.propose(requests), requests, strict=True)]

    def _depth(self, sequence: Sequence) -> int:
        """Never more drafts than could still be emitted beside the model's own token."""
        return min(sequence.depth, sequence.sampling.max_tokens - len(sequence.output) - 1)

    # -- shared

    @property
    def _cache_window(self) -> int:
        return 1 + self.config.max_depth

    def _run(self, sequence: Sequence, start: int, stop: int) -> Run:
        tokens = [sequence.token(position) for position in range(start, stop)]
        return Run(tokens, start, sequence.slot, sequence.pages, sequence.replay)

    def _row(self, sequence: Sequence, drafts: Many[int] = ()) -> Row:
        output = [*sequence.output, *drafts] if sequence.sampling.penalizes or drafts else sequence.output
        return Row(sequence.sampling, sequence.length + len(drafts), sequence.prompt, output)

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.model(batch, self._cache, self.drafter.taps if self.drafter else ())

    def _observe(self, batch: Batch, members: list[Sequence], hidden: Tensor, taps: Tensor, kept: list[int]) -> None:
        """Shows the drafter the first kept[i] tokens of each run, now that the token after each is known."""
        if self.drafter is None:
            return
        counts = torch.tensor(kept, device=self._device)
        keep = (
            torch.arange(batch.num_tokens, device=self._device) - batch.starts[batch.sequence] < counts[batch.sequence]
        )
        following = [
            s.token(position)
            for s, count in zip(members, kept, strict=True)
            for position in range(s.computed - count + 1, s.computed + 1)
        ]
        self.drafter.observe(batch.select(keep), hidden[keep], taps[keep], torch.tensor(following, device=self._device))

    def _emit(self, sequence: Sequence, tokens: list[int]) -> Event:
        for count, token in enumerate(tokens, start=1):
            sequence.output.append(token)
            finish = sequence.finish_after(token)
            if finish:
                return Event(sequence.id, tuple(tokens[:count]), finish)
        return Event(sequence.id, tuple(tokens))

    def _end(self, events: list[Event]) -> None:
        ended = {event.request_id for event in events if event.finish}
        for sequence in [s for s in self._running if s.id in ended]:
            self._remove(sequence)


def check_request(config: ModelConfig, prompt: Many[int], sampling: Sampling) -> None:
    """Refuses what the model itself cannot serve, with the numbers."""
    if not prompt:
        raise RequestError("the prompt is empty: it has 0 tokens, expected at least 1.")
    tokens = [*prompt, *sampling.logit_bias, *sampling.stop_ids]
    outside = next((token for token in tokens if not 0 <= token < config.vocab_size), None)
    if outside is not None:
        raise RequestError(f"token id {outside} is outside the vocabulary of {config.vocab_size:,}.")
    need = len(prompt) + sampling.max_tokens
    if need > config.max_positions:
        raise RequestError(
            f"prompt has {len(prompt):,} tokens and max_tokens asks {sampling.max_tokens:,}: "
            f"{need:,} > context {config.max_positions:,}. Shorten the prompt or lower max_tokens."
        )


def _pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)
