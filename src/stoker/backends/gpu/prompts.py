"""Prompts on the GPU as the engine asks for them: chunk by chunk, and what a drafting network wants to know of each."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker.backends.cpu.cache import KVPages
from stoker.backends.family import PAGE_SIZE
from stoker.backends.gpu.buckets import split_counts
from stoker.backends.gpu.dflash import DFlashObserve
from stoker.backends.gpu.drafting import GpuDFlash, GpuMtp, Network, fill_numbers, is_plain
from stoker.backends.gpu.graphs import Download, Upload
from stoker.backends.gpu.kernels.launch import MAX_TOKENS
from stoker.backends.gpu.prefill import Prefill
from stoker.backends.gpu.slots import SlotCache
from stoker.backends.gpu.state import Bucket, StepInputs
from stoker.backends.gpu.weights import StepWeights
from stoker.engine.backend import Choices
from stoker.engine.config import EngineConfig
from stoker.engine.step import Chunk
from stoker.sampling.sampler import Row, choose
from stoker.weights.model_config import ModelConfig


class Prompts:
    def __init__(
        self,
        config: ModelConfig,
        engine: EngineConfig,
        weights: StepWeights,
        cache: SlotCache,
        network: Network | None,
        tables: Tensor,
        longest: int,
    ) -> None:
        device, chunk = tables.device, engine.prefill_budget
        self._cache, self._tables = cache, tables
        # of the last chunk: its slot, tokens computed before it and in it, and tokens of the whole prompt
        self._slot = self._start = self._count = self._prompt = 0
        self._first: Row | None = None  # how the token after it is chosen, until that is done
        self._prefill = Prefill(config, weights, cache.tensors, chunk, network.taps if network else ())
        self._token = Download(self._prefill.token)
        # the ids of a chunk, then those that follow each
        self._ids = torch.zeros(2, chunk, dtype=torch.int32, device=device)
        self._uploads = [Upload(row) for row in self._ids]
        self._table = torch.zeros(tables.shape[1], dtype=torch.int32, device=device)
        self._mtp = network.network if isinstance(network, GpuMtp) else None
        self._context = None
        if isinstance(network, GpuDFlash):
            bucket = Bucket(1, min(chunk, MAX_TOKENS), split_counts(longest)[-1])
            numbers = StepInputs.numbers(bucket, device)
            self._bucket, self._piece = bucket, Upload(numbers)
            self._inputs = StepInputs.over(numbers, bucket, PAGE_SIZE)
            self._rows = torch.zeros_like(self._prefill.features[: bucket.rows])
            self._context = DFlashObserve(network.network, self._rows, self._inputs)

    def run(self, chunk: Chunk) -> None:
        """A chunk of a prompt."""
        request, count = chunk.request, len(chunk.tokens)
        start, slot = request.computed, request.slot
        self._slot, self._start, self._count, self._prompt = slot, start, count, len(request.prompt)
        self._first = chunk.first
        self._table.copy_(self._tables[slot])
        self._prefill.forward(
            self._sent(0, chunk.tokens), self._table, slot=slot, cached=start,
            replay=self._cache.pending(slot, start), choose=chunk.first is not None,
        )  # fmt: skip
        self._cache.holds(slot, start + count)

    def logits_of(self, start: int, stop: int) -> Tensor:
        """After these rows of the last chunk."""
        return self._prefill.logits_of(start, stop)

    def first_token(self) -> Choices:
        """What follows the last chunk, which ended its prompt."""
        row, logits = self._first, self._prefill.logits
        assert row is not None
        self._first = None
        special = row.allowed is not None or not is_plain(row.sampling)
        token = int(choose(logits, [row])[0]) if special else int(self._token.read()[0])
        return Choices([token], logits, [0])

    def show(self, following: Sequence[int]) -> None:
        """To the drafting network: the rows of the last chunk, and for an MTP head the tokens that follow."""
        slot, start, count = self._slot, self._start, self._count
        if self._mtp is not None:
            assert isinstance(self._mtp.pages, KVPages)
            more = start + count < self._prompt  # only the last token's output is drafted from
            after = self._sent(1, following)
            self._prefill.draft(after, self._table, self._mtp.pages, cached=start, keys_only=more)
            if not more:
                self._mtp.last[slot].copy_(self._prefill.buffers.drafted[count - 1])
        if self._context is not None:
            width = min(self._inputs.tables.shape[1], len(self._table))
            self._inputs.tables[0, :width].copy_(self._table[:width])
            for done in range(0, count, self._bucket.rows):
                rows = min(self._bucket.rows, count - done)
                fill_numbers(self._piece, self._bucket, [([], slot, start + done, rows, 0)])
                self._rows[:rows].copy_(self._prefill.features[done : done + rows])
                self._context.run()

    def _sent(self, row: int, numbers: Sequence[int]) -> Tensor:
        self._uploads[row].open()[: len(numbers)] = numbers
        self._uploads[row].send()
        return self._ids[row, : len(numbers)]
