"""Drafting a whole block in one pass of a DFlash network, which reads the trunk's taps."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from stoker.backends.cpu.batch import Batch, Run
from stoker.backends.cpu.cache import KVPages
from stoker.backends.cpu.decoder import Decoder
from stoker.backends.cpu.dflash import DFlash
from stoker.backends.family import PAGE_SIZE, Family
from stoker.speculate.depth.cost import DraftCost
from stoker.speculate.depth.reads import read_bytes
from stoker.speculate.draft import Draft, GoOn
from stoker.speculate.draft_head import DraftHead, HeadChoice, draft_row
from stoker.speculate.drafter import DraftRequest
from stoker.speculate.postpone import Waiting

SOURCE = "dflash"


class DFlashDrafter:
    """`postpone` committed tokens of a request may wait until the next draft for it, or until they are as many."""

    def __init__(
        self,
        model: Decoder,
        network: DFlash,
        pages: int,
        max_depth: int,
        head: HeadChoice | None = None,
        postpone: int = 0,
    ) -> None:
        network.config.check_fits(model.config)
        config, weight = network.config, model.embed_tokens.weight
        self.taps, self.observes = config.taps, True
        self.max_depth = min(max_depth, config.block_size - 1)
        self._model, self._network, self._head = model, network, DraftHead(model, head)
        self._pages = [
            KVPages.allocate(pages, config.num_kv_heads, config.head_dim, weight.dtype, weight.device)
            for _ in config.layer_types
        ]
        self._postpone, self._waiting = postpone, Waiting()
        read, _ = read_bytes(network, None)
        self.costs: Mapping[str, DraftCost] = {SOURCE: DraftCost(block=read + self._head.nbytes)}

    def observe(self, batch: Batch, hidden: Tensor, taps: Tensor, following: Tensor) -> None:
        if not self._postpone or batch.family is Family.PREFILL:
            self._network.observe(batch, taps, self._pages)
            return
        self._waiting.add(batch, taps, following)
        self._catch_up([slot for slot in batch.slots.tolist() if self._waiting.count(slot) >= self._postpone])

    def propose(self, requests: Sequence[DraftRequest], go_on: GoOn | None = None) -> list[Draft]:
        """The block is [last token, mask, ...]; the row of each mask guesses the token at its own position."""
        live = [i for i, request in enumerate(requests) if request.depth > 0 and not request.free_only]
        found = [Draft() for _ in requests]
        if not live:
            return found
        self._catch_up([requests[i].slot for i in live])
        self._head.read([requests[i] for i in live])
        mask = self._network.config.mask_token_id
        depths = [min(requests[i].depth, self.max_depth) for i in live]
        runs = [
            Run([r.output[-1], *[mask] * depth], r.length - 1, r.slot, r.pages)
            for depth, r in zip(depths, (requests[i] for i in live), strict=True)
        ]
        batch = Batch.of(Family.STEP, runs, PAGE_SIZE, self._model.embed_tokens.weight.device)
        hidden = self._network(batch, self._model.embed_tokens(batch.token_ids), self._pages)
        starts = batch.starts.tolist()
        masks = [start + 1 + place for depth, start in zip(depths, starts, strict=False) for place in range(depth)]
        logits = self._head.logits(hidden[masks])
        first = 0
        for i, depth in zip(live, depths, strict=True):
            found[i] = self._block(requests[i], logits[first : first + depth])
            first += depth
        return found

    def reset(self, slot: int) -> None:
        """Pages are overwritten before they are read."""
        self._waiting.drop(slot)
        self._head.reset(slot)

    def flush(self, slot: int) -> None:
        self._catch_up([slot])

    def _catch_up(self, slots: Sequence[int]) -> None:
        for batch, taps, _ in self._waiting.take(slots):
            self._network.observe(batch, taps, self._pages)

    def _block(self, request: DraftRequest, logits: Tensor) -> Draft:
        """Tokens for the rows of one block; where penalties count earlier drafts, one after the other."""
        guesses: list[tuple[int, float]] = []
        if request.sampling.penalizes:
            for place in range(len(logits)):
                row = draft_row(request, [token for token, _ in guesses])
                guesses += self._head.guess(logits[place : place + 1], [row])
        else:
            rows = [draft_row(request, [0] * place) for place in range(len(logits))]
            guesses = self._head.guess(logits, rows)
        return Draft([token for token, _ in guesses], [sure for _, sure in guesses], SOURCE)
