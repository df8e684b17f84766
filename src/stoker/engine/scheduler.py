"""Who runs and who waits, and whose pages and slots are whose. First come, first served.

Memory is bytes planned ahead (`memory.py`): pages of 64 tokens, which stand for KV of the model and of the drafter
alike, and slots of recurrent state. When pages run out, checkpoints give way first, then the youngest request, which
is computed again later.
"""

from collections import deque
from collections.abc import Iterator

import torch

from stoker.backends.cpu.cache import KVPages
from stoker.backends.family import PAGE_SIZE
from stoker.engine.backend import States
from stoker.engine.config import EngineConfig
from stoker.engine.memory import discard, tensor_bytes
from stoker.engine.pages import Pool
from stoker.engine.prefix_cache import PrefixCache, clip, floor
from stoker.engine.request import Sequence
from stoker.speculate.drafter import Drafter


class Scheduler:
    def __init__(
        self, config: EngineConfig, cache: States, drafter: Drafter | None, longest: int, device: torch.device
    ) -> None:
        """`longest` is the most tokens one request can have."""
        self.config, self._cache, self._drafter = config, cache, drafter
        self.pages, self.slots = Pool(config.pages), Pool(config.slots)
        self.prefixes = PrefixCache(self.pages, config.checkpoints, config.checkpoint_interval)
        self._snapshots = cache.snapshots(config.checkpoints)
        self.snapshot_bytes = tensor_bytes(self._snapshots)
        # a row per slot, written when pages are taken: a step need not build tables from lists as long as the context
        width = min(config.pages, _pages_for(longest))
        self.tables = torch.zeros(config.slots, width, dtype=torch.long, device=device)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self._by_id: dict[int, Sequence] = {}
        self.preemptions = 0

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def add(self, sequence: Sequence) -> None:
        self._by_id[sequence.id] = sequence
        self.waiting.append(sequence)

    def find(self, request_id: int) -> Sequence | None:
        return self._by_id.get(request_id)

    def remove(self, sequence: Sequence) -> None:
        """It has ended: everything it holds is free, its checkpoints stay."""
        del self._by_id[sequence.id]
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self._release(sequence)

    def admit(self, now: float) -> None:
        """The head of the queue waits for room rather than being overtaken."""
        while self.waiting and self.slots.free:
            sequence = self.waiting[0]
            # at least one token is left to compute, from which a drafter learns where it stands
            before = len(sequence.prompt) if not sequence.output else sequence.length - 1
            fixed = None if sequence.stepped is None else sequence.history
            found = None
            if not sequence.scores_prompt:  # all of its prompt has to be computed
                found = self.prefixes.match(sequence.tokens, sequence.chain, before, fixed)
            shared = list(found.pages) if found else []
            need = _pages_for(sequence.length + 1) - len(shared)
            if need > self.pages.free + self.pages.reclaimable:  # told before a long prefix is walked, step after step
                return
            self.pages.share(shared)  # first of all, so that making room cannot drop them
            if need > self.pages.free + self.pages.reclaimable:
                self.pages.give_back(shared)  # no checkpoint is dropped in vain
                return
            while need > self.pages.free and self.prefixes.evict():
                pass
            self.waiting.popleft()
            sequence.slot = self.slots.take()[0]
            self._hand_out(sequence, shared + self.pages.take(need))
            self._cache.reset(sequence.slot)
            if found:
                self._snapshots.restore(self._cache, sequence.slot, found.snapshot)
                sequence.computed = found.position
                if sequence.admitted_at is None:  # later it is its own work that a preempted request finds again
                    sequence.stats.cached_tokens = min(found.position, len(sequence.prompt))
            if sequence.stepped is None:
                sequence.stepped = found.stepped if found else ()
            if self._drafter:
                self._drafter.reset(sequence.slot)
            if sequence.admitted_at is None:
                sequence.admitted_at = now
                sequence.stats.queue_s = now - sequence.submitted_at
            self.running.append(sequence)

    def make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Pages for `tokens` positions; checkpoints give way, then younger requests. False if it had to go itself."""
        need = _pages_for(tokens) - len(sequence.pages)
        while need > self.pages.free:
            if self.prefixes.evict():
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        if need > 0:
            self._hand_out(sequence, self.pages.take(need))
        return True

    def keep_prompt(self, sequence: Sequence) -> None:
        """Takes a checkpoint if one belongs where the prompt is computed up to."""
        position = sequence.computed
        if position in sequence.checkpoints:
            place = sequence.chain.place(sequence.tokens, position)
            index = self.prefixes.add(place, position, sequence.pages, clip(sequence.history, position))
            if index is not None:
                self._save(sequence, index)

    def keep_output(self, sequence: Sequence) -> None:
        """Moves the checkpoint in a request's own output to the multiple of 64 its last step reached or passed.

        The tokens of that step are still pending; those before the checkpoint are committed to its copy of the state.
        """
        position, committed = floor(sequence.computed), sequence.computed - sequence.replay
        if position <= committed or not (self.config.cache_generated and self.prefixes.enabled):
            return
        place, stepped = sequence.chain.place(sequence.tokens, position), clip(sequence.history, position)
        index = self.prefixes.add(place, position, sequence.pages, stepped, sequence.latest_checkpoint)
        sequence.latest_checkpoint = place, stepped
        if index is not None:
            self._save(sequence, index, position - committed)

    def shed(self) -> int:
        """Drops every checkpoint, and hands the memory of snapshots and free pages back. Returns how many bytes."""
        self.prefixes.clear()
        snapshots = [tensor for layer in self._snapshots.layers for tensor in layer]
        free = self.pages.unheld()
        return discard(snapshots, range(self.config.checkpoints)) + discard(_kv_tensors(self._cache), free)

    def check_integrity(self) -> None:
        """Every page and slot is free, or its owners among requests and checkpoints are on record."""
        held = [page for sequence in self.running for page in sequence.pages]
        self.pages.check_integrity(held, self.prefixes.pinned())
        self.prefixes.check_integrity()
        self.slots.check_integrity([sequence.slot for sequence in self.running])
        if {id(sequence) for sequence in self} != {id(sequence) for sequence in (*self.waiting, *self.running)}:
            raise AssertionError("requests by id differ from those that wait or run")
        for sequence in self.running:
            if self.tables[sequence.slot, : len(sequence.pages)].tolist() != sequence.pages:
                raise AssertionError(f"the page table of request {sequence.id} differs from {sequence.pages}")
        for sequence in self.waiting:
            if sequence.slot != -1 or sequence.pages:
                raise AssertionError(f"request {sequence.id} waits and holds slot {sequence.slot}, {sequence.pages}")

    def _save(self, sequence: Sequence, index: int, pending: int = 0) -> None:
        self._snapshots.save(self._cache, sequence.slot, index, pending)
        if self._drafter:
            self._drafter.flush(sequence.slot)  # its KV of the text so far is shared from here on

    def _hand_out(self, sequence: Sequence, pages: list[int]) -> None:
        held = len(sequence.pages)
        sequence.pages += pages
        self.tables[sequence.slot, held : held + len(pages)] = torch.tensor(pages, dtype=torch.long)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; it will be computed again, in the families it was computed in."""
        self._release(sequence)
        sequence.computed = sequence.replay = 0
        sequence.stats.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.slots.give_back([sequence.slot])
        self.pages.give_back(sequence.pages)
        sequence.slot, sequence.pages = -1, []


def _kv_tensors(cache: States) -> list[torch.Tensor]:
    """All that have a row per page."""
    found = [layer for layer in cache.layers if isinstance(layer, KVPages)]
    tensors = [(layer.keys, layer.values, layer.key_scales, layer.value_scales) for layer in found]
    return [tensor for layer in tensors for tensor in layer if tensor is not None]


def _pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)
