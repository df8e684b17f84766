"""Which shapes steps come in: every batch is padded to the smallest that holds it, and a row's bits do not show it."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from stoker.backends.family import SPLIT
from stoker.backends.gpu.kernels.launch import MAX_TOKENS
from stoker.backends.gpu.state import Bucket

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)  # of several sequences; a single one has a bucket for every number
CELLS = 16_384  # tokens times splits of a bucket: they hold a partial sum for every head
FEW_SPLITS, MORE = 8, 8  # the shortest contexts have so many splits of 256 keys; each next kind has so many times more

Item = TypeVar("Item")


def sequence_counts(slots: int) -> list[int]:
    return [*(count for count in (1, 2, 4, 8, 16, 32, 64) if count < min(slots, MAX_TOKENS)), min(slots, MAX_TOKENS)]


def split_counts(longest: int) -> list[int]:
    """For contexts up to `longest` tokens."""
    need, found = -(-longest // SPLIT), []
    count = FEW_SPLITS
    while count < need:
        found.append(count)
        count *= MORE
    return [*found, need]


def step_buckets(slots: int, window: int, longest: int) -> list[Bucket]:
    """Of steps of up to `window` rows a sequence."""
    found = []
    for splits in split_counts(longest):
        for count in sequence_counts(slots):
            several = [*(rows for rows in ROWS if rows < window), window]
            for rows in range(1, window + 1) if count == 1 else several:
                bucket = Bucket(count, rows, splits)
                if count == 1 or (bucket.tokens <= MAX_TOKENS and bucket.cells <= CELLS):
                    found.append(bucket)
    return sorted(set(found), key=_cost)


def smallest(buckets: Sequence[Bucket], count: int, rows: int, keys: int) -> int | None:
    """Index of the first that holds `count` sequences of up to `rows` rows and `keys` keys; None: there is none."""
    for index, bucket in enumerate(buckets):
        if bucket.sequences >= count and bucket.rows >= rows and bucket.splits * SPLIT >= keys:
            return index
    return None


def fitting(
    buckets: Sequence[Bucket], items: Iterable[Item], rows: Callable[[Item], int], keys: Callable[[Item], int]
) -> list[list[Item]]:
    """Groups that each fit a bucket: all of them in one if that may be, else those with many rows together."""
    items = list(items)
    if not items or smallest(buckets, len(items), max(map(rows, items)), max(map(keys, items))) is not None:
        return [items] if items else []
    groups: list[list[Item]] = []
    for item in sorted(items, key=rows, reverse=True):
        group = [*groups[-1], item] if groups else [item]
        fits = smallest(buckets, len(group), max(map(rows, group)), max(map(keys, group))) is not None
        if groups and fits:
            groups[-1] = group
        else:
            groups.append([item])
    return groups


def _cost(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.tokens, bucket.splits, bucket.sequences
