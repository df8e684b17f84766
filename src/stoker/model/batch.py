"""One forward's worth of tokens, flat: which sequence each belongs to, where it stands, where its state lies.

Built once per step from plain lists; the model and the ops see only tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from stoker.ops.attention import QueryTiles
from stoker.ops.family import CHUNK, Family


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one sequence."""

    tokens: Sequence[int]
    cached: int  # tokens of this sequence already in the cache
    slot: int  # recurrent-state slot
    pages: Sequence[int]  # page p holds positions p * page_size ...
    replay: int = 0  # leading tokens of this slot's last step that were accepted: `cached` counts them already


@dataclass(frozen=True)
class Batch:
    """T tokens of B sequences. A forward computes one numeric family only."""

    family: Family
    page_size: int
    token_ids: Tensor  # [T]
    positions: Tensor  # [T] place in the sequence, from 0
    starts: Tensor  # [B + 1] first row of each sequence
    sequence: Tensor  # [T] index into B
    cached: Tensor  # [B]
    slots: Tensor  # [B]
    replay: Tensor  # [B] pending tokens to commit to the recurrent state first
    tables: Tensor  # [B, P] pages, padded with 0

    @classmethod
    def of(cls, family: Family, runs: Sequence[Run], page_size: int, device: torch.device | str = "cpu") -> "Batch":
        lengths = torch.tensor([len(run.tokens) for run in runs], device=device)
        if not runs or int(lengths.min()) < 1:
            raise ValueError("a batch needs at least one run, and every run at least one token")
        for run in runs:
            room = len(run.pages) * page_size
            if run.cached + len(run.tokens) > room:
                raise ValueError(f"{run.cached} + {len(run.tokens)} tokens do not fit {room} places of {run.pages}")
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        sequence = torch.repeat_interleave(torch.arange(len(runs), device=device), lengths)
        cached = torch.tensor([run.cached for run in runs], device=device)
        offsets = torch.arange(int(starts[-1]), device=device) - starts[sequence]
        width = max(len(run.pages) for run in runs)
        return cls(
            family=family,
            page_size=page_size,
            token_ids=torch.tensor([t for run in runs for t in run.tokens], device=device),
            positions=cached[sequence] + offsets,
            starts=starts,
            sequence=sequence,
            cached=cached,
            slots=torch.tensor([run.slot for run in runs], device=device),
            replay=torch.tensor([run.replay for run in runs], device=device),
            tables=torch.tensor([list(r.pages) + [0] * (width - len(r.pages)) for r in runs], device=device),
        )

    def select(self, keep: Tensor) -> "Batch":
        """The rows where keep [T] holds, which must be a prefix of each run; sequences left without any drop out."""
        counts = torch.bincount(self.sequence[keep], minlength=len(self.slots))
        live = counts > 0
        renumbered = live.cumsum(0) - 1
        return Batch(
            family=self.family,
            page_size=self.page_size,
            token_ids=self.token_ids[keep],
            positions=self.positions[keep],
            starts=torch.cat([counts.new_zeros(1), counts[live].cumsum(0)]),
            sequence=renumbered[self.sequence[keep]],
            cached=self.cached[live],
            slots=self.slots[live],
            replay=torch.zeros_like(self.replay[live]),
            tables=self.tables[live],
        )

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @cached_property
    def longest(self) -> int:
        """Most tokens of one sequence."""
        return int((self.starts[1:] - self.starts[:-1]).max())

    @cached_property
    def last_rows(self) -> Tensor:
        """[B] row of each sequence's last token."""
        return self.starts[1:] - 1

    @cached_property
    def places(self) -> Tensor:
        """[T] flat place in the page pool where a token's key and value go."""
        pages = self.tables[self.sequence, self.positions // self.page_size]
        return pages * self.page_size + self.positions % self.page_size

    @cached_property
    def causal_tiles(self) -> QueryTiles:
        """Every token sees its sequence up to itself."""
        return self.tiles(torch.zeros_like(self.positions), self.positions)

    def tiles(self, first: Tensor, last: Tensor) -> QueryTiles:
        """Query tiles of this batch's family for the visible key ranges first..last [T] of each token."""
        if self.family is Family.STEP:
            rows = torch.arange(self.num_tokens, device=first.device)[:, None]
            return QueryTiles(rows, first[:, None], last[:, None], self.tables[self.sequence])
        chunk_rows = self.chunk_rows
        live = chunk_rows.amin(-1) < self.num_tokens  # [B, C]
        rows = chunk_rows[live]
        tables = self.tables[live.nonzero()[:, 0]]
        padded_first = torch.cat([first, first.new_zeros(1)])
        padded_last = torch.cat([last, last.new_full((1,), -1)])
        return QueryTiles(rows, padded_first[rows], padded_last[rows], tables)

    @cached_property
    def step_rows(self) -> Tensor:
        """[B, L] row of the i-th token of each sequence, T where it has fewer."""
        lengths = self.starts[1:] - self.starts[:-1]
        place = torch.arange(self.longest, device=lengths.device)[None]
        return torch.where(place < lengths[:, None], self.starts[:-1, None] + place, self.num_tokens)

    @cached_property
    def chunk_rows(self) -> Tensor:
        """[B, C, 64] row of the token at each place of the 64-token chunks this batch touches, T elsewhere."""
        origin = self.cached // CHUNK * CHUNK  # [B] position of place 0
        place = self.positions - origin[self.sequence]
        chunks = int(place.max()) // CHUNK + 1
        rows = torch.full((len(self.slots), chunks * CHUNK), self.num_tokens, device=place.device)
        rows[self.sequence, place] = torch.arange(self.num_tokens, device=place.device)
        return rows.view(len(self.slots), chunks, CHUNK)

    def conv_inputs(self, kernel: int) -> tuple[Tensor, Tensor]:
        """Rows of cat(carried [B * (kernel - 1)], tokens [T]) that feed each token, and those to carry on.

        -> taps [T, kernel], oldest first, and tail [B, kernel - 1].
        """
        carried = kernel - 1
        total = len(self.slots) * carried
        back = torch.arange(kernel, device=self.positions.device) - carried  # -3 ... 0

        def source(sequence: Tensor, offset: Tensor) -> Tensor:
            """Row of the input at `offset` within a sequence's run; negative offsets are carried ones."""
            old = sequence * carried + carried + offset
            return torch.where(offset < 0, old, total + self.starts[sequence] + offset)

        offsets = self.positions - self.cached[self.sequence]
        taps = source(self.sequence[:, None], offsets[:, None] + back)
        lengths = self.starts[1:] - self.starts[:-1]
        sequences = torch.arange(len(self.slots), device=lengths.device)
        tail = source(sequences[:, None], lengths[:, None] + back[:-1])
        return taps, tail
