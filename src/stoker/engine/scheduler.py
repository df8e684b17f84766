"""Who runs and who waits, in which pages and slots, and what each brings to a step. First come, first served.

Memory is bytes planned ahead (`sizes/memory.py`): pages of 64 tokens, which stand for KV of the model and of the
drafter alike, and slots of recurrent state. When pages run out, snapshots of the prefix cache give way first, then the
youngest request is preempted: it is computed again later.
"""

import math
from collections import deque
from collections.abc import Iterator

import torch

from stoker.backends.family import CHUNK, PAGE_SIZE, Family
from stoker.engine.backend import Backend
from stoker.engine.config import EngineConfig
from stoker.engine.pages import Pool
from stoker.engine.prefix_cache import PrefixCache, clip, floor
from stoker.engine.request import Request
from stoker.engine.step import Chunk, StepTokens
from stoker.errors import RequestError
from stoker.speculate.drafter import Drafter

PACE_FADE = 0.8  # by which a forward counts for less with each that follows
PAUSE_ALONE = 8  # so many pauses a step's prompts may take while nobody's answer runs
FIRST_CHUNK = 512  # tokens, while no time is known

Failed = tuple[Request, RequestError]  # a request whose mask failed, and how


class Pace:
    """How many prompt tokens a step takes: as many as fit, but no more than running answers may wait for.

    A forward takes a time of its own, in which all weights are read, and some for each token. Both are fitted to the
    forwards seen so far, later ones counting for more.
    """

    def __init__(self, most: int, pause_s: float) -> None:
        self._most, self._pause = most, pause_s
        self._sums = [0.0] * 5  # of 1, tokens, tokens^2, seconds, tokens * seconds
        self._fixed = self._each = 0.0  # seconds of a forward, and of each token

    def took(self, tokens: int, seconds: float) -> None:
        terms = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
        self._sums = [PACE_FADE * old + new for old, new in zip(self._sums, terms, strict=True)]
        count, n, nn, t, nt = self._sums
        spread = count * nn - n * n
        slope = (count * nt - n * t) / spread if spread > (0.1 * n) ** 2 else t / n
        self._each = min(max(slope, 0.05 * t / n), t / n)
        self._fixed = (t - self._each * n) / count

    def budget(self, answers: bool) -> int:
        """Prompt tokens of the next step, where `answers` run beside it or none do."""
        limit = self._pause if answers else PAUSE_ALONE * self._pause
        if limit == math.inf:
            return self._most
        if not self._each:
            return min(self._most, FIRST_CHUNK)
        # at least half of the time goes into tokens, or weights would be read again and again for a few of them
        tokens = max(limit - self._fixed, self._fixed) / self._each
        return max(CHUNK, min(self._most, int(min(tokens, self._most)) // CHUNK * CHUNK))


class Scheduler:
    def __init__(self, config: EngineConfig, backend: Backend, drafter: Drafter | None) -> None:
        self.config, self._backend, self._drafter = config, backend, drafter
        self.pages, self.slots = Pool(config.pages), Pool(config.slots)
        self.pace = Pace(config.prefill_budget, config.prefill_pause)
        self.prefixes = PrefixCache(self.pages, config.snapshots, config.snapshot_interval)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self._by_id: dict[int, Request] = {}
        self.preemptions = 0

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_id.values())

    def add(self, request: Request) -> None:
        self._by_id[request.id] = request
        self.waiting.append(request)

    def find(self, request_id: int) -> Request | None:
        return self._by_id.get(request_id)

    def remove(self, request: Request) -> None:
        """It has ended: everything it holds is free, its snapshots stay."""
        del self._by_id[request.id]
        if request.slot < 0:
            self.waiting.remove(request)
        else:
            self._release(request)

    def admit(self, now: float) -> None:
        """The head of the queue waits for room rather than being overtaken."""
        while self.waiting and self.slots.free:
            request = self.waiting[0]
            # at least one token is left to compute, from which a drafter learns where it stands
            before = len(request.prompt) if not request.output else request.length - 1
            fixed = None if request.stepped is None else request.history
            found = None
            if not request.scores_prompt:  # all of its prompt has to be computed
                found = self.prefixes.match(request.tokens, request.chain, before, fixed)
            shared = list(found.pages) if found else []
            need = _pages_for(request.length + 1) - len(shared)
            if need > self.pages.free + self.pages.reclaimable:  # told before a long prefix is walked, step after step
                return
            self.pages.share(shared)  # first of all, so that making room cannot drop them
            if need > self.pages.free + self.pages.reclaimable:
                self.pages.give_back(shared)  # no snapshot is dropped in vain
                return
            while need > self.pages.free and self.prefixes.evict():
                pass
            self.waiting.popleft()
            request.slot = self.slots.take()[0]
            self._hand_out(request, shared + self.pages.take(need))
            self._backend.reset(request.slot)
            if found:
                self._backend.restore(request.slot, found.index)
                request.computed = found.position
                if request.admitted_at is None:  # later it is its own work that a preempted request finds again
                    request.stats.cached_tokens = min(found.position, len(request.prompt))
            if request.stepped is None:
                request.stepped = found.stepped if found else ()
            if self._drafter:
                self._drafter.reset(request.slot)
            if request.admitted_at is None:
                request.admitted_at = now
                request.stats.queue_s = now - request.submitted_at
            self.running.append(request)

    def next_chunks(self) -> tuple[list[Chunk], list[Failed]]:
        """Prompt chunks within the budget of a step. Requests whose mask failed are gone already."""
        chunks: list[Chunk] = []
        failed: list[Failed] = []
        budget = self.pace.budget(answers=any(request.output for request in self.running))
        for request in list(self.running):
            family, end = request.stretch()
            if family is not Family.PREFILL or not budget:
                continue
            # chunks end at multiples of 64 or with the stretch, so that chunking never shows in the bits
            stop = min(end, (request.computed + budget) // CHUNK * CHUNK)
            inside = [place for place in request.snapshots_at if request.computed < place < stop]
            if inside and not self._backend.keeps_inside:
                stop, inside = inside[0], []
            if stop <= request.computed:
                break
            first = None
            if stop == len(request.prompt) and not request.output:  # a preempted request has its first token
                if not request.mask_ready:
                    continue
                try:
                    first = StepTokens.decoding(request, self._backend.model.vocab_size, window=1).rows()[0]
                except RequestError as error:
                    self.remove(request)
                    failed.append((request, error))
                    continue
            kept = [(place, index) for place in inside if (index := self._enter(request, place)) is not None]
            chunks.append(Chunk(request, request.tokens[request.computed : stop], first, kept))
            budget -= stop - request.computed
        return chunks, failed

    def next_step(self) -> tuple[list[StepTokens], list[Failed]]:
        """What each running request brings to a step, with pages for it; requests whose mask failed are gone."""
        entries: list[StepTokens] = []
        failed: list[Failed] = []
        for request in list(self.running):
            family, stop = request.stretch()
            if request.slot < 0 or family is not Family.STEP:  # an older request may just have pushed it out
                continue
            if not request.decoding:
                entries.append(StepTokens.replaying(request, min(stop, request.computed + self.config.window)))
                continue
            if not request.mask_ready:
                continue
            try:
                entry = StepTokens.decoding(request, self._backend.model.vocab_size, self.config.window)
            except RequestError as error:
                self.remove(request)
                failed.append((request, error))
                continue
            reach = len(entry.drafts) if entry.forced else request.draft_limit(self.config.max_depth)
            if self._make_room(request, request.length + reach):
                entries.append(entry)
        return entries, failed

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Pages for `tokens` positions; snapshots give way, then younger requests. False if it had to go itself."""
        need = _pages_for(tokens) - len(request.pages)
        while need > self.pages.free:
            if self.prefixes.evict():
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        if need > 0:
            self._hand_out(request, self.pages.take(need))
        return True

    def keep_prompt(self, request: Request) -> None:
        """Takes a snapshot if one belongs where the prompt is computed up to."""
        if request.computed in request.snapshots_at:
            index = self._enter(request, request.computed)
            if index is not None:
                self._backend.save(request.slot, index)

    def _enter(self, request: Request, position: int) -> int | None:
        """Where the state at this position of a prompt is to be kept; None if there is a snapshot of it."""
        place = request.chain.place(request.tokens, position)
        return self.prefixes.add(place, position, request.pages, clip(request.history, position))

    def keep_output(self, request: Request) -> None:
        """Moves the snapshot in a request's own output to the multiple of 64 its last step reached or passed.

        The tokens of that step are still pending; those before the snapshot are committed to it.
        """
        position, committed = floor(request.computed), request.computed - request.replay
        if position <= committed or not (self.config.cache_generated and self.prefixes.enabled):
            return
        place, stepped = request.chain.place(request.tokens, position), clip(request.history, position)
        index = self.prefixes.add(place, position, request.pages, stepped, request.latest_snapshot)
        request.latest_snapshot = place, stepped
        if index is not None:
            self._backend.save(request.slot, index, position - committed)

    def release_memory(self) -> int:
        """Drops every snapshot, and hands their memory and that of free pages back. Returns how many bytes."""
        self.prefixes.clear()
        return self._backend.release_memory(self.pages.unheld())

    def check_integrity(self) -> None:
        """Every page and slot is free, or its owners among requests and snapshots are on record."""
        held = [page for request in self.running for page in request.pages]
        self.pages.check_integrity(held, self.prefixes.pinned())
        self.prefixes.check_integrity()
        self.slots.check_integrity([request.slot for request in self.running])
        if {id(request) for request in self} != {id(request) for request in (*self.waiting, *self.running)}:
            raise AssertionError("requests by id differ from those that wait or run")
        for request in self.running:
            if self._backend.tables[request.slot, : len(request.pages)].tolist() != request.pages:
                raise AssertionError(f"the page table of request {request.id} differs from {request.pages}")
        for request in self.waiting:
            if request.slot != -1 or request.pages:
                raise AssertionError(f"request {request.id} waits and holds slot {request.slot}, {request.pages}")

    def _hand_out(self, request: Request, pages: list[int]) -> None:
        held = len(request.pages)
        request.pages += pages
        self._backend.tables[request.slot, held : held + len(pages)] = torch.tensor(pages, dtype=torch.long)

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue; it will be computed again, in the families it was computed in."""
        self._release(request)
        request.computed = request.replay = 0
        request.stats.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.slots.give_back([request.slot])
        self.pages.give_back(request.pages)
        request.slot, request.pages = -1, []


def _pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)
