"""Prompts on the GPU as the engine asks for them: chunk by chunk, and what a drafting network wants to know of each."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from stoker.backends.family import PAGE_SIZE
from stoker.backends.gpu.buckets import split_counts
from stoker.backends.gpu.dflash import DFlashObserve
from stoker.backends.gpu.drafting import GpuDFlash, GpuMtp, Network, fill_numbers, is_plain
from stoker.backends.gpu.graphs import Download, Recorder, Upload
from stoker.backends.gpu.kernels.launch import MAX_TOKENS
from stoker.backends.gpu.prefill import Part, Prefill
from stoker.backends.gpu.slots import GpuSnapshots, SlotCache
from stoker.backends.gpu.state import Bucket, StepInputs
from stoker.backends.gpu.weights import StepWeights
from stoker.backends.network.cache import KVPages
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
        snapshots: GpuSnapshots,
        network: Network | None,
        tables: Tensor,
        longest: int,
        recorder: Recorder,
    ) -> None:
        device, chunk = tables.device, engine.prefill_budget
        self._cache, self._tables, self._snapshots = cache, tables, snapshots
        self._prefill = Prefill(
            config, weights, cache.tensors, chunk, network.taps if network else (), snapshots.kept(),
            parts=engine.slots, copies=engine.dense_copies,
        )  # fmt: skip
        self._prefill.record(recorder)
        self._chosen = Download(self._prefill.tokens)
        # of the last forward: its parts, the rows each begins with, and those that end a prompt
        self._parts: list[Part] = []
        self._begins: list[int] = []
        self._ends: list[bool] = []
        self._firsts: list[Row] = []  # how the tokens after prompts are chosen, until that is done
        # the ids of a chunk, then those that follow each
        self._ids = torch.zeros(2, chunk, dtype=torch.int32, device=device)
        self._uploads = [Upload(row) for row in self._ids]
        self._mtp = network.network if isinstance(network, GpuMtp) else None
        self._context = None
        if isinstance(network, GpuDFlash):
            bucket = Bucket(1, min(chunk, MAX_TOKENS), split_counts(longest)[-1])
            numbers = StepInputs.numbers(bucket, device)
            self._bucket, self._piece = bucket, Upload(numbers)
            self._inputs = StepInputs.over(numbers, bucket, PAGE_SIZE)
            self._rows = torch.zeros_like(self._prefill.features[: bucket.rows])
            self._context = DFlashObserve(network.network, self._rows, self._inputs)

    @property
    def copies(self) -> object:
        """Of dense weights, in 16 bit; None if there are none."""
        return self._prefill.copies

    def run(self, chunks: Sequence[Chunk]) -> None:
        """Chunks of different prompts, no more than MOST_PARTS."""
        parts = []
        for chunk in chunks:
            request, count = chunk.request, len(chunk.tokens)
            self._cache.settle_at(request.slot, request.computed)
            for position, snapshot in chunk.keeps:
                self._snapshots.positions[snapshot] = position
            table, ends = self._tables[request.slot], chunk.first is not None
            parts.append(Part(request.slot, request.computed, count, chunk.keeps, table, ends))
        self._parts = parts
        self._begins = [0, *accumulate(part.count for part in parts)][:-1]
        self._ends = [chunk.request.computed + len(chunk.tokens) == len(chunk.request.prompt) for chunk in chunks]
        self._firsts = [chunk.first for chunk in chunks if chunk.first is not None]
        self._prefill.forward(self._sent(0, [token for chunk in chunks for token in chunk.tokens]), parts)
        for part in parts:
            self._cache.holds(part.slot, part.cached + part.count)

    def logits_of(self, index: int, start: int, stop: int) -> Tensor:
        """After these rows of a part of the last forward."""
        return self._prefill.logits_of(self._begins[index] + start, self._begins[index] + stop)

    def first_tokens(self) -> Choices:
        """What follows the parts of the last forward that ended their prompts."""
        rows, self._firsts = self._firsts, []
        logits, count = self._prefill.logits, len(rows)
        special = [at for at, row in enumerate(rows) if row.allowed is not None or not is_plain(row.sampling)]
        if special:
            chosen = choose(logits[special], [rows[at] for at in special])
            self._prefill.tokens[special] = chosen.int()
        return Choices(self._chosen.read()[:count].tolist(), logits, list(range(count)))

    def show(self, following: Sequence[Sequence[int]]) -> None:
        """To the drafting network: the rows of the last forward, and for an MTP head the tokens that follow."""
        if self._mtp is not None:
            assert isinstance(self._mtp.pages, KVPages)
            after = self._sent(1, [token for tokens in following for token in tokens])
            # only the output at a prompt's last token is drafted from
            self._prefill.draft(after, self._mtp.pages, keys_only=not any(self._ends))
            for part, begin, ends in zip(self._parts, self._begins, self._ends, strict=True):
                if ends:
                    self._mtp.last[part.slot].copy_(self._prefill.buffers.drafted[begin + part.count - 1])
        if self._context is not None:
            for part, begin in zip(self._parts, self._begins, strict=True):
                self._show_context(part, begin)

    def _show_context(self, part: Part, begin: int) -> None:
        assert self._context is not None
        assert part.table is not None
        width = min(self._inputs.tables.shape[1], len(part.table))
        self._inputs.tables[0, :width].copy_(part.table[:width])
        for done in range(0, part.count, self._bucket.rows):
            rows = min(self._bucket.rows, part.count - done)
            fill_numbers(self._piece, self._bucket, [([], part.slot, part.cached + done, rows, 0)])
            self._piece.send()
            self._rows[:rows].copy_(self._prefill.features[begin + done : begin + done + rows])
            self._context.run()

    def _sent(self, row: int, numbers: Sequence[int]) -> Tensor:
        self._uploads[row].open()[: len(numbers)] = numbers
        self._uploads[row].send()
        return self._ids[row, : len(numbers)]
