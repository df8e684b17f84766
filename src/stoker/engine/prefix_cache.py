"""Texts that begin alike are computed once. A recurrent state cannot be rewound, so copies of it are kept.

A snapshot lies at a multiple of 64 tokens, strictly inside a text. It is a copy of the recurrent state and
pins the KV pages before it (drafters keep their KV in pages of the same numbers). Starting from one in a prompt gives
the bits of starting cold, since prompt chunks may end at any multiple of 64 anyway.

Generated text was computed as steps, which round differently. A snapshot behind such text says which parts were
(`stepped`), and a request that starts from it takes that over: computed again without the snapshot, say after a
preemption, those parts are steps again and the bits are the same. From the snapshot on, all the rest of its prompt is
prefill, whether or not it was generated once: chunks stay anchored at multiples of 64.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stoker.backends.family import CHUNK, PAGE_SIZE
from stoker.engine.pages import Pool

Stretches = tuple[tuple[int, int], ...]  # [start, stop) positions computed as steps, in order
Place = tuple[bytes, int]  # hash of all tokens before, and the token there
Key = tuple[Place, Stretches]


@dataclass(frozen=True)
class Snapshot:
    position: int
    index: int  # where the backend keeps the state
    pages: tuple[int, ...]  # of positions 0 .. position - 1
    stepped: Stretches


class Chain:
    """Hashes of a growing text at its multiples of 64; every token is hashed once."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []

    def place(self, text: Sequence[int], position: int) -> Place:
        """The token at a position is part of its place: a drafter's KV at t already knows the token at t + 1."""
        while len(self._digests) * CHUNK < position:
            start = len(self._digests) * CHUNK
            before = self._digests[-1] if self._digests else b""
            block = array("q", text[start : start + CHUNK]).tobytes()
            self._digests.append(hashlib.blake2b(before + block, digest_size=16).digest())
        return self._digests[position // CHUNK - 1], text[position]


class PrefixCache:
    """The books of snapshots, least recently used first. Copying states is not its part."""

    def __init__(self, pages: Pool, snapshots: int, interval: int) -> None:
        self._pages, self._interval = pages, interval
        self._indices = Pool(snapshots)
        self._entries: OrderedDict[Key, Snapshot] = OrderedDict()
        self._variants: dict[Place, list[Stretches]] = {}  # the same text, computed in different ways

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def enabled(self) -> bool:
        return self._indices.size > 0

    def match(self, text: Sequence[int], chain: Chain, before: int, stepped: Stretches | None) -> Snapshot | None:
        """The longest snapshot that `text` goes through, strictly before position `before`.

        One whose text was all prompt is preferred to another of the same text. With `stepped` only those will do whose
        text was computed just so.
        """
        if not self._entries:
            return None
        for position in range(floor(before - 1), 0, -CHUNK):
            place = chain.place(text, position)
            variants = self._variants.get(place)
            if variants is None:
                continue
            wanted = min(variants) if stepped is None else clip(stepped, position)
            if wanted in variants:
                self._entries.move_to_end((place, wanted))
                return self._entries[place, wanted]
        return None

    def wanted(self, prompt: Sequence[int], boundaries: Iterable[int]) -> list[int]:
        """Where snapshots should lie: before the prompt's end, before each message boundary, and every so often."""
        if not self.enabled:
            return []
        last = floor(len(prompt) - 1)
        places = {floor(boundary - 1) for boundary in boundaries if 0 < boundary <= len(prompt)}
        return sorted({*range(self._interval, last, self._interval), *places, last} - {0})

    def add(
        self,
        place: Place,
        position: int,
        pages: Sequence[int],
        stepped: Stretches,
        instead_of: Key | None = None,
    ) -> int | None:
        """Enters a snapshot and returns where its state is to be saved; None if it is known already.

        `instead_of` is an earlier one of the same text, which goes unless it is one of the regular ones. Its pins are
        taken over, so that moving a snapshot along costs the same in a long text as in a short one.
        """
        key = place, stepped
        pinned = tuple(pages[: position // PAGE_SIZE])
        before = self._entries.get(instead_of) if instead_of else None
        taken_over = 0
        if instead_of and before and before.position % self._interval and instead_of != key:
            if key not in self._entries and before.pages == pinned[: len(before.pages)]:
                taken_over = len(before.pages)
            self._drop(instead_of, first_unpinned=taken_over)
        if key in self._entries:
            self._entries.move_to_end(key)
            return None
        if not self._indices.free:
            self._drop(next(iter(self._entries)))
        index = self._indices.take()[0]
        self._pages.share(pinned[taken_over:], pin=True)
        self._entries[key] = Snapshot(position, index, pinned, stepped)
        self._variants.setdefault(place, []).append(stepped)
        return index

    def evict(self) -> bool:
        """Drops the least recently used snapshot that gives a page back; False if no page can be had from them."""
        if not self._pages.reclaimable:
            return False
        # who holds a page holds all before it, so a snapshot's last page is the first that nobody else needs
        freeing = (key for key, entry in self._entries.items() if self._pages.pinned_alone(entry.pages[-1]))
        self._drop(next(freeing, None) or next(iter(self._entries)))  # several may pin the same pages
        return True

    def clear(self) -> None:
        """Drops every snapshot."""
        for key in list(self._entries):
            self._drop(key)

    def pinned(self) -> list[int]:
        """Every page once per snapshot that holds it."""
        return [page for entry in self._entries.values() for page in entry.pages]

    def check_integrity(self) -> None:
        self._indices.check_integrity(entry.index for entry in self._entries.values())
        variants = {(place, stepped) for place, found in self._variants.items() for stepped in found}
        if variants != set(self._entries):
            raise AssertionError(f"{len(variants)} ways to a place are on record, but {len(self._entries)} snapshots")

    def _drop(self, key: Key, first_unpinned: int = 0) -> None:
        """Forgets a snapshot; pins of its pages before `first_unpinned` are left to another."""
        entry = self._entries.pop(key)
        place, stepped = key
        self._variants[place].remove(stepped)
        if not self._variants[place]:
            del self._variants[place]
        self._indices.give_back([entry.index])
        self._pages.give_back(entry.pages[first_unpinned:], pin=True)


def message_boundaries(prompt: Sequence[int], start_token: int) -> list[int]:
    """Positions where messages begin, given the token that begins each: `boundaries` of a chat prompt."""
    return [position for position, token in enumerate(prompt) if token == start_token]


def clip(stretches: Stretches, position: int) -> Stretches:
    """The part of them before `position`."""
    return tuple((start, min(stop, position)) for start, stop in stretches if start < position)


def floor(position: int) -> int:
    """The last multiple of 64 that is not after `position`."""
    return position // CHUNK * CHUNK
