"""Drafting with the model's own MTP head: one layer, fed back to itself for depths beyond one.

The head's KV row at position t needs the token at t + 1. Rows written while drafting are guesses; `observe`
overwrites them from true hiddens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker.model.batch import Batch, Run
from stoker.model.cache import PAGE_SIZE, KVPages
from stoker.model.decoder import Decoder
from stoker.ops.family import Family
from stoker.speculate.drafter import DraftRequest
from stoker.speculate.sampler import Row, choose


class MtpDrafter:
    taps: tuple[int, ...] = ()

    def __init__(self, model: Decoder, pages: int, slots: int, max_depth: int) -> None:
        if model.mtp is None:
            raise ValueError("this model has no MTP head")
        self.max_depth = max_depth
        self._model, self._head = model, model.mtp
        config, weight = model.config, model.embed_tokens.weight
        self._pages = KVPages.allocate(pages, config.num_kv_heads, config.head_dim, weight.dtype, weight.device)
        # output of the head at the last observed position: the first draft comes from it
        self._last = weight.new_zeros(slots, config.hidden_size)

    def observe(self, batch: Batch, hidden: Tensor, taps: Tensor, following: Tensor) -> None:
        out = self._head(batch, self._model.embed_tokens(following), hidden, self._pages)
        self._last[batch.slots] = out[batch.last_rows]

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in requests]
        live = [i for i, request in enumerate(requests) if request.depth > 0]
        hidden = self._last[[requests[i].slot for i in live]]
        while live:
            rows = [
                Row(r.sampling, r.length + len(drafts[i]), r.prompt, [*r.output, *drafts[i]])
                for i, r in ((i, requests[i]) for i in live)
            ]
            for i, token in zip(live, choose(self._model.logits(hidden), rows).tolist(), strict=True):
                drafts[i].append(token)
            deeper = [len(drafts[i]) < min(requests[i].depth, self.max_depth) for i in live]
            live, hidden = [i for i, more in zip(live, deeper, strict=True) if more], hidden[torch.tensor(deeper)]
            if live:
                # the head at position p reads the token at p + 1: here the newest draft
                runs = [
                    Run([drafts[i][-1]], requests[i].length + len(drafts[i]) - 2, requests[i].slot, requests[i].pages)
                    for i in live
                ]
                batch = Batch.of(Family.STEP, runs, PAGE_SIZE, hidden.device)
                hidden = self._head(batch, self._model.embed_tokens(batch.token_ids), hidden, self._pages)
        return drafts

    def reset(self, slot: int) -> None:
        """Pages are overwritten before they are read."""
