"""Drafting a whole block in one pass of a DFlash network, which reads the trunk's taps."""

from collections.abc import Sequence

from torch import Tensor

from stoker.model.batch import Batch, Run
from stoker.model.cache import PAGE_SIZE, KVPages
from stoker.model.decoder import Decoder
from stoker.model.dflash import DFlash
from stoker.ops.family import Family
from stoker.speculate.drafter import DraftRequest
from stoker.speculate.sampler import Row, choose


class DFlashDrafter:
    def __init__(self, model: Decoder, network: DFlash, pages: int, max_depth: int) -> None:
        network.config.check_fits(model.config)
        config, weight = network.config, model.embed_tokens.weight
        self.taps = config.taps
        self.max_depth = min(max_depth, config.block_size - 1)
        self._model, self._network = model, network
        self._pages = [
            KVPages.allocate(pages, config.num_kv_heads, config.head_dim, weight.dtype, weight.device)
            for _ in config.layer_types
        ]

    def observe(self, batch: Batch, hidden: Tensor, taps: Tensor, following: Tensor) -> None:
        self._network.observe(batch, taps, self._pages)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """The block is [last token, mask, ...]; the row of each mask guesses the token at its own position."""
        drafts: list[list[int]] = [[] for _ in requests]
        live = [i for i, request in enumerate(requests) if request.depth > 0]
        if not live:
            return drafts
        mask = self._network.config.mask_token_id
        depths = [min(requests[i].depth, self.max_depth) for i in live]
        runs = [
            Run([r.output[-1], *[mask] * depth], r.length - 1, r.slot, r.pages)
            for depth, r in zip(depths, (requests[i] for i in live), strict=True)
        ]
        batch = Batch.of(Family.STEP, runs, PAGE_SIZE, self._model.embed_tokens.weight.device)
        hidden = self._network(batch, self._model.embed_tokens(batch.token_ids), self._pages)
        logits = self._model.logits(hidden)
        for i, depth, start in zip(live, depths, batch.starts.tolist(), strict=False):
            request = requests[i]
            for place in range(depth):
                row = Row(request.sampling, request.length + place, request.prompt, [*request.output, *drafts[i]])
                drafts[i] += choose(logits[start + 1 + place : start + 2 + place], [row]).tolist()
        return drafts

    def reset(self, slot: int) -> None:
        """Pages are overwritten before they are read."""
