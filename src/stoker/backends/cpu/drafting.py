"""Drafting networks on the CPU: what they are shown, what they keep, and their guesses.

An MTP head's KV row at position t needs the token at t + 1. Rows written while drafting are guesses; they are
overwritten when the backend shows true hiddens.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stoker.backends.cpu.draft_head import DraftHead, HeadChoice
from stoker.backends.family import PAGE_SIZE, Family
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.cache import KVPages
from stoker.backends.network.count import loaded_bytes
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.dflash import DFlash
from stoker.speculate.depth.cost import DraftCost
from stoker.speculate.drafter import DraftRequest, draft_row
from stoker.weights.names import MTP_PREFIX

ROWS = 128  # of one pass in the step family


class DraftNetwork(Protocol):
    """What the backend does with a network that drafts."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Trunk layers whose output `observe` needs."""

    def observe(self, batch: Batch, hidden: Tensor, taps: Tensor, following: Tensor) -> None:
        """Committed tokens: their post-norm hidden [T, H], taps [T, n * H] and the token that follows each [T]."""

    def reset(self, slot: int) -> None:
        """The slot belongs to a new request."""

    def flush(self, slot: int) -> None:
        """Everything observed of this slot is now in the network's KV. Needed before its pages are shared."""


class _Network(ABC):
    """What both networks share. `postpone` committed tokens of a request may wait until the next draft for it, or until
    they are as many."""

    def __init__(self, model: Decoder, head: HeadChoice | None, postpone: int) -> None:
        self.model, self.head = model, DraftHead(model, head)
        self.postpone, self.waiting = postpone, Waiting()

    @abstractmethod
    def compute(self, batch: Batch, values: Tensor, following: Tensor) -> None:
        """Rows of what the network reads of committed tokens, and the token after each."""

    def groups(self, requests: Sequence[DraftRequest], depths: Sequence[int]) -> list[list[int]]:
        """All at once, however many."""
        return [list(range(len(requests)))]

    def reset(self, slot: int) -> None:
        """Pages are overwritten before they are read."""
        self.waiting.drop(slot)
        self.head.reset(slot)

    def flush(self, slot: int) -> None:
        self._catch_up([slot])

    def _show(self, batch: Batch, values: Tensor, following: Tensor) -> None:
        if not self.postpone or batch.family is Family.PREFILL:
            self.compute(batch, values, following)
            return
        self.waiting.add(batch, values, following)
        self._catch_up([slot for slot in batch.slots.tolist() if self.waiting.count(slot) >= self.postpone])

    def _prepare(self, requests: Sequence[DraftRequest]) -> None:
        """Before drafts are made for them."""
        self._catch_up([request.slot for request in requests])
        self.head.read(requests)

    def _catch_up(self, slots: Sequence[int]) -> None:
        for batch, values, following in self.waiting.take(slots):
            self.compute(batch, values, following)


class CpuMtp(_Network):
    taps: tuple[int, ...] = ()

    def __init__(
        self, model: Decoder, pages: int, slots: int, head: HeadChoice | None = None, postpone: int = 0
    ) -> None:
        super().__init__(model, head, postpone)
        if model.mtp is None:
            raise ValueError("this model has no MTP head")
        self.network, config, weight = model.mtp, model.config, model.embed_tokens.weight
        self.pages = KVPages.allocate(pages, config.num_kv_heads, config.head_dim, weight.dtype, weight.device)
        # output of the network at the last observed position: the first draft comes from it
        self.last = weight.new_zeros(slots, config.hidden_size)
        # every draft reads head and layer: the layer's first pass is that of observing the newest tokens
        weights, moe = loaded_bytes(self.network, MTP_PREFIX), config.moe
        layer = weights.mtp_read(moe.top_k, moe.num_experts) if moe else weights.total
        self.cost = DraftCost(token=layer + self.head.nbytes)

    def observe(self, batch: Batch, hidden: Tensor, taps: Tensor, following: Tensor) -> None:
        self._show(batch, hidden, following)

    def compute(self, batch: Batch, values: Tensor, following: Tensor) -> None:
        out = self.network(batch, self.model.embed_tokens(following), values, self.pages)
        self.last[batch.slots] = out[batch.last_rows]

    def begin(self, requests: Sequence[DraftRequest], depths: Sequence[int]) -> "_Passes":
        self._prepare(requests)
        return _Passes(self, requests)


class _Passes:
    """Drafts of some requests; those that have enough drop out of the forwards."""

    def __init__(self, own: CpuMtp, requests: Sequence[DraftRequest]) -> None:
        self._own, self._requests = own, requests
        self._live = list(range(len(requests)))
        self._drafts: list[list[int]] = [[] for _ in requests]
        self._sure: list[list[float]] = [[] for _ in requests]
        self._hidden = own.last[[request.slot for request in requests]]
        self._guess()

    def next(self, depths: Sequence[int]) -> None:
        deeper = [len(self._drafts[i]) < depths[i] for i in self._live]
        self._live = [i for i, more in zip(self._live, deeper, strict=True) if more]
        # the network at position p reads the token at p + 1: here the newest draft
        requests, drafts = self._requests, self._drafts
        runs = [
            Run([drafts[i][-1]], requests[i].length + len(drafts[i]) - 2, requests[i].slot, requests[i].pages)
            for i in self._live
        ]
        own, before = self._own, self._hidden[torch.tensor(deeper)]
        batch = Batch.of(Family.STEP, runs, PAGE_SIZE, before.device)
        self._hidden = own.network(batch, own.model.embed_tokens(batch.token_ids), before, own.pages)
        self._guess()

    def read(self, depths: Sequence[int]) -> tuple[list[list[int]], list[list[float]]]:
        return (
            [drafts[:depth] for drafts, depth in zip(self._drafts, depths, strict=True)],
            [sure[:depth] for sure, depth in zip(self._sure, depths, strict=True)],
        )

    def _guess(self) -> None:
        rows = [draft_row(self._requests[i], self._drafts[i]) for i in self._live]
        head = self._own.head
        for i, (token, sure) in zip(self._live, head.guess(head.logits(self._hidden), rows), strict=True):
            self._drafts[i].append(token)
            self._sure[i].append(sure)


class CpuDFlash(_Network):
    def __init__(
        self, model: Decoder, network: DFlash, pages: int, head: HeadChoice | None = None, postpone: int = 0
    ) -> None:
        super().__init__(model, head, postpone)
        network.config.check_fits(model.config)
        self.network, self.config, weight = network, network.config, model.embed_tokens.weight
        self.taps = self.config.taps
        self.pages = [
            KVPages.allocate(pages, self.config.num_kv_heads, self.config.head_dim, weight.dtype, weight.device)
            for _ in self.config.layer_types
        ]
        self.cost = DraftCost(block=loaded_bytes(network).total + self.head.nbytes)

    def observe(self, batch: Batch, hidden: Tensor, taps: Tensor, following: Tensor) -> None:
        self._show(batch, taps, following)

    def compute(self, batch: Batch, values: Tensor, following: Tensor) -> None:
        self.network.observe(batch, values, self.pages)

    def blocks(
        self, requests: Sequence[DraftRequest], depths: Sequence[int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """A block is [last token, mask, ...]; the row of each mask guesses the token at its own position."""
        self._prepare(requests)
        mask = self.config.mask_token_id
        runs = [
            Run([r.output[-1], *[mask] * depth], r.length - 1, r.slot, r.pages)
            for depth, r in zip(depths, requests, strict=True)
        ]
        batch = Batch.of(Family.STEP, runs, PAGE_SIZE, self.model.embed_tokens.weight.device)
        hidden = self.network(batch, self.model.embed_tokens(batch.token_ids), self.pages)
        starts = batch.starts.tolist()
        masks = [start + 1 + place for depth, start in zip(depths, starts, strict=False) for place in range(depth)]
        each = self.head.logits(hidden[masks]).split(list(depths))
        guesses = [self._block(request, logits) for request, logits in zip(requests, each, strict=True)]
        return [[token for token, _ in block] for block in guesses], [[sure for _, sure in block] for block in guesses]

    def _block(self, request: DraftRequest, logits: Tensor) -> list[tuple[int, float]]:
        """Tokens for the rows of one block; where penalties count earlier drafts, one after the other."""
        if not request.sampling.penalizes:
            return self.head.guess(logits, [draft_row(request, [0] * place) for place in range(len(logits))])
        guesses: list[tuple[int, float]] = []
        for place in range(len(logits)):
            row = draft_row(request, [token for token, _ in guesses])
            guesses += self.head.guess(logits[place : place + 1], [row])
        return guesses


@dataclass(frozen=True)
class _Piece:
    start: int  # position of the first token
    pages: list[int]
    values: Tensor  # [n, ..] what the network reads of each token
    following: Tensor  # [n]


class Waiting:
    """Committed tokens a drafter has been shown but has not computed yet: per slot, in the order of the text.

    While drafting does not pay, running the drafter's network over every new token would still cost a few per cent of
    each step. Its rows do not depend on how many are computed together, so they can wait and be caught up in one pass.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, list[_Piece]] = {}
        self._counts: dict[int, int] = {}

    def add(self, batch: Batch, values: Tensor, following: Tensor) -> None:
        """Rows of `batch` with what belongs to each: values [T, ..] and the token that follows [T]."""
        starts, slots, cached = batch.starts.tolist(), batch.slots.tolist(), batch.cached.tolist()
        tables = batch.tables.tolist()
        for i, slot in enumerate(slots):
            rows = slice(starts[i], starts[i + 1])
            piece = _Piece(cached[i], tables[i], values[rows].clone(), following[rows].clone())
            self._pieces.setdefault(slot, []).append(piece)
            self._counts[slot] = self._counts.get(slot, 0) + starts[i + 1] - starts[i]

    def count(self, slot: int) -> int:
        return self._counts.get(slot, 0)

    def drop(self, slot: int) -> None:
        self._pieces.pop(slot, None)
        self._counts.pop(slot, None)

    def take(self, slots: Sequence[int]) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Batches of at most 128 rows with their values and following tokens: as few as that allows, a slot's rows in
        order."""
        runs: list[Run] = []
        values: list[Tensor] = []
        following: list[Tensor] = []
        room = ROWS
        for slot in slots:
            pieces = self._pieces.get(slot)
            if not pieces:
                continue
            start, pages = pieces[0].start, pieces[-1].pages
            own, after = torch.cat([p.values for p in pieces]), torch.cat([p.following for p in pieces])
            self.drop(slot)
            first = 0
            while first < len(own):
                part = slice(first, first + room)
                # the network reads only positions, pages and values: what the tokens were is in the values
                runs.append(Run(after[part].tolist(), start + first, slot, pages))
                values.append(own[part])
                following.append(after[part])
                room -= len(values[-1])
                first += len(values[-1])
                if not room:
                    yield _together(runs, values, following)
                    runs, values, following, room = [], [], [], ROWS
        if runs:
            yield _together(runs, values, following)


def _together(runs: list[Run], values: list[Tensor], following: list[Tensor]) -> tuple[Batch, Tensor, Tensor]:
    return (
        Batch.of(Family.STEP, runs, PAGE_SIZE, values[0].device),
        torch.cat(values),
        torch.cat(following),
    )
