"""One forward's worth of tokens, flat: which sequence each belongs to, where it stands, where its state lies, and which
keys it sees.

Built once per step from plain lists; the model and its operations see only tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from stoker.backends.family import CHUNK, SPLIT, STEP_TILE, Family


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one sequence."""

    tokens: Sequence[int]
    cached: int  # tokens of this sequence already in the cache
    slot: int  # recurrent-state slot
    pages: Sequence[int]  # page p holds positions p * page_size ...
    replay: int = 0  # leading tokens of this slot's last step that were accepted: `cached` counts them already


@dataclass(frozen=True)
class Split:
    """What some tiles see of one stretch of 256 keys."""

    tiles: Tensor | None  # [n] which tiles see any of it; None: all
    pages: Tensor  # [n * 256 / page_size]
    hidden: Tensor  # [n, 1, Q, 1, 256] 0 where a key is visible, -inf where it is not
    unseen: Tensor  # [n, 1, Q, 1] -inf for a row that sees no key of it, else 0


@dataclass(frozen=True)
class QueryTiles:
    """Which rows attend to which keys. N tiles of Q rows; a padding row holds an empty range of keys.

    A tile holds the tokens of one sequence's chunk (8 in a step, 64 in prefill), each at its place in it.
    """

    rows: Tensor  # [N, Q] row of the flat batch, or T for padding
    first: Tensor  # [N, Q] first visible key position
    last: Tensor  # [N, Q] last visible key position, inclusive; first - 1 for padding
    tables: Tensor  # [N, P] page of the pool that holds positions p * page_size ...
    page_size: int

    @cached_property
    def splits(self) -> Sequence[Split]:
        """Made once and shared by all layers."""
        reach = self.last.amax(1)  # [N] last key any row of the tile sees
        begin = torch.where(self.last >= self.first, self.first, reach[:, None] + 1).amin(1)  # [N]
        pages = SPLIT // self.page_size
        found = []
        for start in range(0, int(reach.max()) + 1, SPLIT):
            live = ((reach >= start) & (begin < start + SPLIT)).nonzero()[:, 0]
            if not len(live):
                continue
            table = self.tables[live, start // self.page_size : start // self.page_size + pages]
            table = functional.pad(table, (0, pages - table.shape[1]))  # a short one is filled up: shapes stay fixed
            positions = start + torch.arange(SPLIT, device=live.device)
            visible = (positions >= self.first[live, :, None]) & (positions <= self.last[live, :, None])  # [n, Q, S]
            hidden = torch.zeros(visible.shape, device=live.device).masked_fill_(~visible, -torch.inf)
            everyone = len(live) == len(self.rows)
            unseen = hidden.amax(-1)[:, None, :, None]
            found.append(Split(None if everyone else live, table.flatten(), hidden[:, None, :, None], unseen))
        return found


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
        if not runs or not all(run.tokens for run in runs):
            raise ValueError("a batch needs at least one run, and every run at least one token")
        starts = [0]
        positions: list[int] = []
        sequence: list[int] = []
        for index, run in enumerate(runs):
            count, room = len(run.tokens), len(run.pages) * page_size
            if run.cached + count > room:
                raise ValueError(f"{run.cached} + {count} tokens do not fit {room} places of {run.pages}")
            starts.append(starts[-1] + count)
            positions += range(run.cached, run.cached + count)
            sequence += [index] * count
        width = max(len(run.pages) for run in runs)

        def tensor(numbers: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.long, device=device)

        return cls(
            family=family,
            page_size=page_size,
            token_ids=tensor([token for run in runs for token in run.tokens]),
            positions=tensor(positions),
            starts=tensor(starts),
            sequence=tensor(sequence),
            cached=tensor([run.cached for run in runs]),
            slots=tensor([run.slot for run in runs]),
            replay=tensor([run.replay for run in runs]),
            tables=tensor([[*run.pages, *[0] * (width - len(run.pages))] for run in runs]),
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

    def first(self, count: int) -> "Batch":
        """Its first tokens alone, of a single sequence: what `select` gives, in a fraction of the time."""
        return Batch(
            family=self.family,
            page_size=self.page_size,
            token_ids=self.token_ids[:count],
            positions=self.positions[:count],
            starts=self.starts.clamp(max=count),
            sequence=self.sequence[:count],
            cached=self.cached,
            slots=self.slots,
            replay=torch.zeros_like(self.replay),
            tables=self.tables,
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
        rows, sequences = self._tile_rows
        padded_first = torch.cat([first, first.new_zeros(1)])
        padded_last = torch.cat([last, last.new_full((1,), -1)])
        return QueryTiles(rows, padded_first[rows], padded_last[rows], self.tables[sequences], self.page_size)

    @cached_property
    def _tile_rows(self) -> tuple[Tensor, Tensor]:
        """Rows [N, Q] of the query tiles, T where a place is empty, and the sequence [N] of each."""
        if self.family is Family.STEP:
            return self._step_tile_rows()
        live = self.chunk_rows.amin(-1) < self.num_tokens  # [B, C]
        return self.chunk_rows[live], live.nonzero()[:, 0]

    def _step_tile_rows(self) -> tuple[Tensor, Tensor]:
        """A step has few tokens: lists are faster than a dozen operations on tensors."""
        rows: list[int] = []
        sequences: list[int] = []
        starts = self.starts.tolist()
        for index, (start, stop, cached) in enumerate(zip(starts, starts[1:], self.cached.tolist(), strict=False)):
            before = cached % STEP_TILE
            after = -(before + stop - start) % STEP_TILE
            rows += [self.num_tokens] * before + list(range(start, stop)) + [self.num_tokens] * after
            sequences += [index] * ((before + stop - start + after) // STEP_TILE)
        numbers = torch.tensor(rows + sequences, dtype=torch.long, device=self.starts.device)
        return numbers[: len(rows)].view(-1, STEP_TILE), numbers[len(rows) :]

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
