"""Drafting with the model's own MTP head: one layer, fed back to itself for depths beyond one.

The head's KV row at position t needs the token at t + 1. Rows written while drafting are guesses; `observe`
overwrites them from true hiddens.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stoker.backends.cpu.batch import Batch, Run
from stoker.backends.cpu.cache import KVPages
from stoker.backends.cpu.decoder import Decoder
from stoker.backends.family import PAGE_SIZE, Family
from stoker.speculate.depth.cost import DraftCost
from stoker.speculate.depth.reads import read_bytes
from stoker.speculate.draft import Draft, GoOn
from stoker.speculate.draft_head import DraftHead, HeadChoice, draft_row
from stoker.speculate.drafter import DraftRequest
from stoker.speculate.postpone import Waiting

SOURCE = "mtp"


class MtpDrafter:
    """`postpone` committed tokens of a request may wait until the next draft for it, or until they are as many."""

    taps: tuple[int, ...] = ()
    observes = True

    def __init__(
        self, model: Decoder, pages: int, slots: int, max_depth: int, head: HeadChoice | None = None, postpone: int = 0
    ) -> None:
        if model.mtp is None:
            raise ValueError("this model has no MTP head")
        self.max_depth = max_depth
        self._model, self._network, self._head = model, model.mtp, DraftHead(model, head)
        config, weight = model.config, model.embed_tokens.weight
        self._pages = KVPages.allocate(pages, config.num_kv_heads, config.head_dim, weight.dtype, weight.device)
        # output of the network at the last observed position: the first draft comes from it
        self._last = weight.new_zeros(slots, config.hidden_size)
        self._postpone, self._waiting = postpone, Waiting()
        # every draft reads head and layer: the layer's first pass is that of observing the newest tokens
        layer, _ = read_bytes(self._network, config.moe, tokens=1)
        self.costs: Mapping[str, DraftCost] = {SOURCE: DraftCost(token=layer + self._head.nbytes)}

    def observe(self, batch: Batch, hidden: Tensor, taps: Tensor, following: Tensor) -> None:
        if not self._postpone or batch.family is Family.PREFILL:
            self._observe(batch, hidden, following)
            return
        self._waiting.add(batch, hidden, following)
        self._catch_up([slot for slot in batch.slots.tolist() if self._waiting.count(slot) >= self._postpone])

    def propose(self, requests: Sequence[DraftRequest], go_on: GoOn | None = None) -> list[Draft]:
        live = [i for i, request in enumerate(requests) if request.depth > 0 and not request.free_only]
        if not live:
            return [Draft() for _ in requests]
        drafts: list[list[int]] = [[] for _ in requests]
        sure: list[list[float]] = [[] for _ in requests]
        self._catch_up([requests[i].slot for i in live])
        self._head.read([requests[i] for i in live])
        hidden = self._last[[requests[i].slot for i in live]]
        while live:
            rows = [draft_row(requests[i], drafts[i]) for i in live]
            guesses = self._head.guess(self._head.logits(hidden), rows)
            for i, (token, confidence) in zip(live, guesses, strict=True):
                drafts[i].append(token)
                sure[i].append(confidence)
            deeper = [len(drafts[i]) < min(requests[i].depth, self.max_depth) for i in live]
            if go_on and any(deeper):
                wanted = go_on([Draft(d, s, SOURCE if d else "") for d, s in zip(drafts, sure, strict=True)])
                deeper = [can and wanted[i] for i, can in zip(live, deeper, strict=True)]
            live, hidden = [i for i, more in zip(live, deeper, strict=True) if more], hidden[torch.tensor(deeper)]
            if live:
                # the network at position p reads the token at p + 1: here the newest draft
                runs = [
                    Run([drafts[i][-1]], requests[i].length + len(drafts[i]) - 2, requests[i].slot, requests[i].pages)
                    for i in live
                ]
                batch = Batch.of(Family.STEP, runs, PAGE_SIZE, hidden.device)
                hidden = self._network(batch, self._model.embed_tokens(batch.token_ids), hidden, self._pages)
        return [Draft(d, s, SOURCE) if d else Draft() for d, s in zip(drafts, sure, strict=True)]

    def reset(self, slot: int) -> None:
        """Pages are overwritten before they are read."""
        self._waiting.drop(slot)
        self._head.reset(slot)

    def flush(self, slot: int) -> None:
        self._catch_up([slot])

    def _catch_up(self, slots: Sequence[int]) -> None:
        for batch, hidden, following in self._waiting.take(slots):
            self._observe(batch, hidden, following)

    def _observe(self, batch: Batch, hidden: Tensor, following: Tensor) -> None:
        out = self._network(batch, self._model.embed_tokens(following), hidden, self._pages)
        self._last[batch.slots] = out[batch.last_rows]
