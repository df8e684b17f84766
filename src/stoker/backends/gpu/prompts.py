"""Prompts on the GPU as the engine asks for them: chunk by chunk, and what a drafting network wants to know of each."""

import torch
from torch import Tensor

from stoker.backends.cpu.cache import KVPages
from stoker.backends.family import PAGE_SIZE
from stoker.backends.gpu.buckets import split_counts
from stoker.backends.gpu.dflash import DFlashObserve
from stoker.backends.gpu.drafters import DFlashDrafter, MtpDrafter, fill_numbers, is_plain
from stoker.backends.gpu.graphs import Download, Upload
from stoker.backends.gpu.int4 import MAX_TOKENS
from stoker.backends.gpu.prefill import Prefill
from stoker.backends.gpu.slots import SlotCache
from stoker.backends.gpu.state import Bucket, StepInputs
from stoker.backends.gpu.weights import StepWeights
from stoker.engine.config import EngineConfig
from stoker.engine.flat import Part
from stoker.engine.outcome import Emitted, emit, following, score_prompt
from stoker.engine.request import Sequence
from stoker.sampling.sampler import Row, choose
from stoker.weights.model_config import ModelConfig


class Prompts:
    def __init__(
        self,
        config: ModelConfig,
        engine: EngineConfig,
        weights: StepWeights,
        cache: SlotCache,
        network: MtpDrafter | DFlashDrafter | None,
        tables: Tensor,
        longest: int,
    ) -> None:
        device, chunk = tables.device, engine.prefill_budget
        self._cache, self._tables = cache, tables
        self._prefill = Prefill(config, weights, cache.tensors, chunk, network.taps if network else ())
        self._token = Download(self._prefill.token)
        # the ids of a chunk, then those that follow each
        self._ids = torch.zeros(2, chunk, dtype=torch.int32, device=device)
        self._uploads = [Upload(row) for row in self._ids]
        self._table = torch.zeros(tables.shape[1], dtype=torch.int32, device=device)
        self._mtp = network.network if isinstance(network, MtpDrafter) else None
        self._context = None
        if isinstance(network, DFlashDrafter):
            bucket = Bucket(1, min(chunk, MAX_TOKENS), split_counts(longest)[-1])
            numbers = StepInputs.numbers(bucket, device)
            self._bucket, self._piece = bucket, Upload(numbers)
            self._inputs = StepInputs.over(numbers, bucket, PAGE_SIZE)
            self._rows = torch.zeros_like(self._prefill.features[: bucket.rows])
            self._context = DFlashObserve(network.network, self._rows, self._inputs)

    def run(self, part: Part, first: Row | None) -> Emitted:
        """A chunk of a prompt. What `first` describes chooses the request's first token."""
        sequence, count = part.request, len(part.tokens)
        start, slot = sequence.computed, sequence.slot
        self._table.copy_(self._tables[slot])
        self._prefill.forward(
            self._sent(0, part.tokens), self._table, slot=slot, cached=start,
            replay=self._cache.pending(slot, start), choose=first is not None,
        )  # fmt: skip
        if sequence.scores_prompt:
            score_prompt(sequence, count, self._prefill.logits_of)
        sequence.computed += count
        sequence.replay = 0
        sequence.stats.prefill_tokens += count
        self._cache.holds(slot, sequence.computed)
        emitted: Emitted = []
        if first is not None:
            token = self._first(first)
            emitted.append((sequence, emit(sequence, [token], self._prefill.logits, 0)))
        self._show(sequence, start, count)
        return emitted

    def _first(self, row: Row) -> int:
        if row.allowed is not None or not is_plain(row.sampling):
            return int(choose(self._prefill.logits, [row])[0])
        return int(self._token.read()[0])

    def _show(self, sequence: Sequence, start: int, count: int) -> None:
        """To the drafting network: the rows of the chunk, and for an MTP head the tokens that follow."""
        if self._mtp is not None:
            assert isinstance(self._mtp.pages, KVPages)
            more = sequence.computed < len(sequence.prompt)  # only the last token's output is drafted from
            after = self._sent(1, following([sequence], [count]))
            self._prefill.draft(after, self._table, self._mtp.pages, cached=start, keys_only=more)
            if not more:
                self._mtp.last[sequence.slot].copy_(self._prefill.buffers.drafted[count - 1])
        if self._context is not None:
            width = min(self._inputs.tables.shape[1], len(self._table))
            self._inputs.tables[0, :width].copy_(self._table[:width])
            for done in range(0, count, self._bucket.rows):
                rows = min(self._bucket.rows, count - done)
                fill_numbers(self._piece, self._bucket, [([], sequence.slot, start + done, rows, 0)])
                self._rows[:rows].copy_(self._prefill.features[done : done + rows])
                self._context.run()

    def _sent(self, row: int, numbers: list[int]) -> Tensor:
        self._uploads[row].open()[: len(numbers)] = numbers
        self._uploads[row].send()
        return self._ids[row, : len(numbers)]
