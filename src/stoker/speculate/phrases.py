"""Phrases a model often writes: contexts of a few tokens, the likeliest next token and its chance. No torch.

The file lies beside a model's weights; `training/phrases.py` makes that of the embedded model. Contexts are kept as
hashes, so one that is not in the table is now and then taken for one that is; the chances have that counted in.
"""

import lzma
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from stoker.errors import CheckpointError
from stoker.weights.checkpoint import PHRASES
from stoker.weights.headers import read_header

VERSION = 1
LONGEST = 8  # tokens of a context
HASH_BITS = 27
FACTOR = 0x9E3779B97F4A7C15  # odd and without a pattern
MASK, SHIFT = (1 << 64) - 1, 64 - HASH_BITS
ANSWER_BITS = 32
ANSWER_MASK = (1 << ANSWER_BITS) - 1
# about: version, vocabulary, tokens of the longest context, entries. chances: of each class. counts: entries of each
# class and token. hashes: ascending within such a group, groups of few entries first, as differences. The latter two
# are compressed, byte by byte of their numbers: all first bytes, all second ones, and so on.
TENSORS = {"about": ("U32", (4,)), "chances": ("F32", None), "counts": ("U8", None), "hashes": ("U8", None)}
PLAIN_BYTES = {"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 0, "pb": 0}  # nothing is like what precedes it
Answer = tuple[int, float]  # a token, and the chance that it comes next


class Phrases:
    """`next` takes a microsecond or two: a multiplication and a glance into the table for each token of a context.

    An entry is the hash of a context and, in the lower half, the number of its answer, counted from one. It lies at the
    place that the upper bits of its hash name or at the next free one after it, and half the places are free.
    """

    def __init__(
        self, hashes: np.ndarray, kinds: np.ndarray, chances: Sequence[float], vocab_size: int, longest: int
    ) -> None:
        """By context: its hash, and class of chance * vocab_size + next token."""
        self.longest, self._chances, self._vocab_size = longest, list(chances), vocab_size
        self._count, self._bits = len(hashes), min(HASH_BITS, max(1, 2 * len(hashes)).bit_length())
        order = np.argsort(hashes)
        homes, numbers = hashes[order] >> (HASH_BITS - self._bits), np.arange(len(hashes))
        places = numbers + np.maximum.accumulate(homes - numbers)
        table = np.zeros(max(1 << self._bits, int(places.max(initial=0)) + 1) + 1, np.uint64)
        table[places] = hashes[order] << ANSWER_BITS | (kinds[order] + 1)
        self._table = array("Q", table.tobytes())

    def __len__(self) -> int:
        return self._count

    def next(self, recent: Sequence[int]) -> Answer | None:
        """What follows a text that ends with `recent`: the answer of the longest context that is known."""
        table, shift = self._table, 64 - self._bits
        found = hashed = 0
        for token in recent[: -self.longest - 1 : -1]:
            hashed = (hashed ^ token + 1) * FACTOR & MASK
            place, wanted = hashed >> shift, hashed >> SHIFT
            while entry := table[place]:
                if entry >> ANSWER_BITS == wanted:
                    found = entry
                    break
                place += 1
        if not found:
            return None
        kind, token = divmod((found & ANSWER_MASK) - 1, self._vocab_size)
        return token, self._chances[kind]

    @classmethod
    def beside(cls, directory: Path, vocab_size: int) -> "Phrases | None":
        """The table in a checkpoint directory, if it has one."""
        path = directory / PHRASES
        return cls.load(path, vocab_size) if path.exists() else None

    @classmethod
    def load(cls, path: Path, vocab_size: int) -> "Phrases":
        """The table in a file; the model must have the vocabulary that it was made for."""
        infos = read_header(path)
        if infos.keys() != TENSORS.keys() or any(
            infos[name].dtype != dtype or shape not in (None, infos[name].shape)
            for name, (dtype, shape) in TENSORS.items()
        ):
            raise CheckpointError(f"{path} is no table of phrases; expected {', '.join(TENSORS)}; remove it.")
        stored = load_file(path)
        version, vocabulary, longest, entries = stored["about"].tolist()
        if version != VERSION:
            raise CheckpointError(f"{path} is a table of version {version}, expected {VERSION}; make it anew.")
        if vocabulary != vocab_size:
            raise CheckpointError(
                f"{path} is for a vocabulary of {vocabulary:,} tokens and the model has {vocab_size:,}: "
                "it belongs to another model; remove it."
            )
        if not 1 <= longest <= LONGEST:
            raise CheckpointError(f"{path} has contexts of up to {longest:,} tokens, expected 1 to {LONGEST}.")
        chances = stored["chances"].tolist()
        counts = _unpack(path, "counts", stored, len(chances) * vocabulary, 2)
        differences = _unpack(path, "hashes", stored, entries, 4)
        if counts.sum() != entries or not all(0.0 <= chance <= 1.0 for chance in chances):
            raise CheckpointError(f"{path} is damaged: its counts or chances make no sense; fetch the file again.")
        groups = np.argsort(counts, kind="stable")
        sums = np.cumsum(differences)
        before = np.cumsum(counts[groups]) - counts[groups]  # entries before each group
        sums -= np.repeat(np.concatenate([[0], sums])[before], counts[groups])
        if sums.max(initial=0) >> HASH_BITS:
            raise CheckpointError(f"{path} is damaged: a hash has more than {HASH_BITS} bits; fetch the file again.")
        return cls(sums, np.repeat(groups, counts[groups]), chances, vocabulary, longest)


def save(
    path: Path,
    hashes: np.ndarray,
    tokens: np.ndarray,
    classes: np.ndarray,
    chances: Sequence[float],
    vocab_size: int,
    longest: int,
) -> int:
    """Writes entries: hash of the context, next token, class of its chance. -> bytes of the file."""
    kinds = classes * vocab_size + tokens
    counts = np.bincount(kinds, minlength=len(chances) * vocab_size)
    place = np.empty_like(counts)
    place[np.argsort(counts, kind="stable")] = np.arange(len(counts))
    order = np.lexsort((hashes, place[kinds]))
    hashes, places = hashes[order].astype(np.int64), place[kinds][order]
    differences = np.diff(hashes, prepend=0)
    begins = np.diff(places, prepend=-1) != 0
    differences[begins] = hashes[begins]
    save_file(
        {
            "about": np.array([VERSION, vocab_size, longest, len(hashes)], np.uint32),
            "chances": np.array(chances, np.float32),
            "counts": _pack(counts, 2),
            "hashes": _pack(differences, 4),
        },
        path,
    )
    return path.stat().st_size


def hashes_of(contexts: np.ndarray) -> np.ndarray:
    """Hashes of contexts of the same length: [N, tokens] -> [N]."""
    hashed = np.zeros(len(contexts), np.uint64)
    for tokens in contexts.T[::-1]:
        hashed = (hashed ^ (tokens.astype(np.uint64) + np.uint64(1))) * np.uint64(FACTOR)
    return (hashed >> np.uint64(SHIFT)).astype(np.int64)


def _pack(numbers: np.ndarray, width: int) -> np.ndarray:
    planes = numbers.astype(f"<u{width}").view(np.uint8).reshape(-1, width).T
    packed = lzma.compress(planes.tobytes(), check=lzma.CHECK_CRC32, filters=[PLAIN_BYTES])
    return np.frombuffer(packed, np.uint8)


def _unpack(path: Path, name: str, stored: dict[str, np.ndarray], count: int, width: int) -> np.ndarray:
    try:
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        planes = unpacker.decompress(stored[name].tobytes(), count * width + 1)
    except lzma.LZMAError as error:
        raise CheckpointError(
            f"{path} is damaged: {name} cannot be unpacked ({error}); fetch the file again."
        ) from None
    if len(planes) != count * width or not unpacker.eof:
        raise CheckpointError(
            f"{path} is damaged: {name} unpacks to {len(planes):,} bytes, expected {count * width:,}; "
            "fetch the file again."
        )
    return np.frombuffer(planes, np.uint8).reshape(width, count).T.copy().view(f"<u{width}")[:, 0].astype(np.int64)
