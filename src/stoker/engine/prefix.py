"""Prompts that begin alike are computed once. A recurrent state cannot be rewound, so it is kept at checkpoints.

A checkpoint lies at a multiple of 64 tokens, strictly inside a prompt. It holds a snapshot of the recurrent state and
pins the KV pages before it. Starting from it gives the bits of starting cold, since prompt chunks may end at any
multiple of 64 anyway.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stoker.engine.pages import Pool
from stoker.model.cache import PAGE_SIZE
from stoker.ops.family import CHUNK

Key = tuple[bytes, int]


@dataclass(frozen=True)
class Checkpoint:
    position: int
    snapshot: int  # place in the snapshot store
    pages: tuple[int, ...]  # of positions 0 .. position - 1


class PrefixCache:
    """The book of checkpoints, least recently used first. Copying states is the engine's part."""

    def __init__(self, pages: Pool, snapshots: int, interval: int) -> None:
        self._pages, self._interval = pages, interval
        self._snapshots = Pool(snapshots)
        self._entries: OrderedDict[Key, Checkpoint] = OrderedDict()

    def match(self, prompt: Sequence[int]) -> Checkpoint | None:
        """The longest checkpoint that `prompt` goes through, strictly before its end."""
        found = None
        for key in _keys(prompt):
            if key in self._entries:
                found = key
        if found is None:
            return None
        self._entries.move_to_end(found)
        return self._entries[found]

    def wanted(self, prompt: Sequence[int], boundaries: Iterable[int]) -> list[int]:
        """Where checkpoints should lie: before the prompt's end, before each message boundary, and every so often."""
        if not self._snapshots.size:
            return []
        last = _floor(len(prompt) - 1)
        places = {_floor(boundary - 1) for boundary in boundaries if 0 < boundary <= len(prompt)}
        return sorted({*range(self._interval, last, self._interval), *places, last} - {0})

    def add(self, prompt: Sequence[int], position: int, pages: Sequence[int]) -> int | None:
        """Enters a checkpoint and returns where its state is to be saved; None if it is known already."""
        key = _key_at(prompt, position)
        if key in self._entries:
            self._entries.move_to_end(key)
            return None
        if not self._snapshots.free:
            self.evict()
        snapshot = self._snapshots.take()[0]
        pinned = tuple(pages[: position // PAGE_SIZE])
        self._pages.share(pinned)
        self._entries[key] = Checkpoint(position, snapshot, pinned)
        return snapshot

    def evict(self) -> bool:
        """Drops the least recently used checkpoint; False if there is none."""
        if not self._entries:
            return False
        _, entry = self._entries.popitem(last=False)
        self._snapshots.give_back([entry.snapshot])
        self._pages.give_back(entry.pages)
        return True

    def pinned(self) -> list[int]:
        """Every page once per checkpoint that holds it."""
        return [page for entry in self._entries.values() for page in entry.pages]

    def check_integrity(self) -> None:
        self._snapshots.check_integrity(entry.snapshot for entry in self._entries.values())


def _floor(position: int) -> int:
    return position // CHUNK * CHUNK


def _keys(prompt: Sequence[int]) -> Iterable[Key]:
    """A key per multiple of 64 strictly inside the prompt: a hash of everything before it, and the token there (a
    drafter's KV at t already knows the token at t + 1)."""
    chain = b""
    for position in range(CHUNK, len(prompt), CHUNK):
        text = ",".join(map(str, prompt[position - CHUNK : position]))
        chain = hashlib.blake2b(chain + text.encode(), digest_size=16).digest()
        yield chain, prompt[position]


def _key_at(prompt: Sequence[int], position: int) -> Key:
    return list(_keys(prompt[: position + 1]))[-1]
