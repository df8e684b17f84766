# Triton types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Where the sequences of a prompt's forward stand. Kernels read it from the device, so that one recording of their
launches serves prompts of any length up to its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.backends.family import CHUNK
from stoker.backends.gpu.graphs import Upload

FIELDS = 5


@dataclass(frozen=True)
class Place:
    """A sequence of a forward: `count` tokens from position `cached` on, whose recurrent state is in `slot`."""

    slot: int
    cached: int
    count: int
    keeps: Sequence[tuple[int, int]] = ()  # ends of chunks among its tokens, and the snapshots to make there

    @property
    def chunks(self) -> int:
        """Of 64 at absolute multiples, begun ones included."""
        return -(-(self.cached % CHUNK + self.count) // CHUNK)


@dataclass(frozen=True)
class Places:
    """`numbers` [S, FIELDS]: of each sequence slot, cached, tokens (0: there is none), first row, first chunk.
    `longest` and `chunks` bound the tokens and the chunks of one, `count` is how many launches are made for."""

    numbers: Tensor  # int32
    kept: Tensor  # int32: the snapshot to make at the end of each chunk; -1: none
    ends: Tensor  # [S] int32: last rows of the sequences that ask for a token, in their order
    total: Tensor  # [1] int32: rows in use
    count: int
    longest: int
    chunks: int


class PlacesUpload:
    """The numbers of all sequences in one tensor, written by one copy."""

    def __init__(self, sequences: int, tokens: int, device: torch.device | str) -> None:
        self.sequences = sequences
        self.most_chunks = tokens // CHUNK + 2 * sequences  # of all sequences together
        ends = FIELDS * sequences
        whole = torch.zeros(ends + sequences + 1 + self.most_chunks, dtype=torch.int32, device=device)
        self._upload = Upload(whole)
        self._all = Places(
            whole[:ends].view(sequences, FIELDS), whole[ends + sequences + 1 :], whole[ends : ends + sequences],
            whole[ends + sequences : ends + sequences + 1], sequences, tokens, most_chunks(tokens),
        )  # fmt: skip

    def send(self, places: Sequence[Place], ends: Sequence[int]) -> Places:
        """`ends`: those of them that ask for a token."""
        numbers = self._upload.open()
        fields = numbers[: FIELDS * self.sequences].reshape(self.sequences, FIELDS)
        lasts = numbers[FIELDS * self.sequences :][: self.sequences]
        kept = numbers[(FIELDS + 1) * self.sequences + 1 :]
        kept.fill(-1)
        row = chunk = 0
        rows = []
        for index, place in enumerate(places):
            fields[index] = place.slot, place.cached, place.count, row, chunk
            for position, snapshot in place.keeps:
                kept[chunk + position // CHUNK - 1 - place.cached // CHUNK] = snapshot
            row, chunk = row + place.count, chunk + place.chunks
            rows.append(row - 1)
        lasts[: len(ends)] = [rows[index] for index in ends]
        numbers[(FIELDS + 1) * self.sequences] = row
        self._upload.send()
        longest, most = max(place.count for place in places), max(place.chunks for place in places)
        return replace(self._all, count=len(places), longest=longest, chunks=most)

    def bounded(self, tokens: int, count: int) -> Places:
        """For a recording that serves up to so many tokens of so many sequences."""
        return replace(self._all, count=count, longest=tokens, chunks=most_chunks(tokens))


def most_chunks(tokens: int) -> int:
    """That many tokens may begin and end within a chunk."""
    return (tokens + 2 * CHUNK - 2) // CHUNK


@triton.jit
def place_of(places_ptr, sequence):
    """slot, cached, tokens, first row, first chunk"""
    at = places_ptr + sequence * 5
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
