"""The engine's backend on the GPU: each step goes into the smallest bucket that holds it and runs as a recorded graph.

A step of greedy requests has two small reads by the host: the drafts (`drafting.py`) and the model's choices here. What
needs more than the largest logit is chosen by the exact sampler from the logits on the device, in the same read, which
also brings how many experts were touched.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from stoker.backends.family import PAGE_SIZE
from stoker.backends.gpu.buckets import fitting, smallest, step_buckets
from stoker.backends.gpu.dflash import DFlashObserve
from stoker.backends.gpu.drafting import GpuDFlash, GpuMtp, Network, copy_tables, fill_numbers, is_plain
from stoker.backends.gpu.graphs import Download, Recorder, Upload
from stoker.backends.gpu.mtp import MtpObserve
from stoker.backends.gpu.prefill import MOST_PARTS
from stoker.backends.gpu.prompts import Prompts
from stoker.backends.gpu.slots import SlotCache
from stoker.backends.gpu.state import Bucket, GpuCache, StepBuffers, StepInputs
from stoker.backends.gpu.step import Step
from stoker.backends.gpu.weights import StepWeights
from stoker.backends.memory import tensor_bytes
from stoker.backends.network.cache import FP8
from stoker.backends.progress import RECORDING, Report, silent
from stoker.engine.backend import Choices
from stoker.engine.config import EngineConfig
from stoker.engine.step import Chunk, StepTokens, split_rows
from stoker.sampling.sampler import Row, choose
from stoker.speculate.depth.cost import StepBytes
from stoker.weights.model_config import ModelConfig


class Program:
    """Steps of one bucket, numbers in and choices out included. `watch` shows a MTP head what followed."""

    def __init__(self, step: Step, tables: Tensor, upload: Upload, recorder: Recorder) -> None:
        self.step, self.bucket, self._tables, self._upload = step, step.bucket, tables, upload
        self.context: DFlashObserve | None = None
        self._results, self._recorder = Download(step.buffers.results), recorder
        self._following: Upload | None = None

    def record(self) -> None:
        self._forward = self._recorder.record(self._first, self._rest)

    def follow(self, network: GpuMtp, buffers: StepBuffers) -> None:
        """The MTP head is to see every token this program computes."""
        bucket = self.bucket
        numbers = torch.zeros(bucket.tokens + 2 * bucket.sequences, dtype=torch.int32, device=self._tables.device)
        self._following, self._nobody = Upload(numbers), len(network.network.last) - 1
        self._observing = MtpObserve(network.network, self.step, numbers, buffers)
        self._observe = self._recorder.record(self._launch_observe)

    def forward(self, rows: Sequence[tuple[list[int], int, int, int]]) -> None:
        """Of each sequence: tokens, slot, tokens before them, and how many of those the state does not hold yet."""
        numbers = [(tokens, slot, cached, len(tokens), replay) for tokens, slot, cached, replay in rows]
        fill_numbers(self._upload, self.bucket, numbers)
        self._forward()
        self._upload.mark()
        self._results.mark()

    def _first(self) -> None:
        self._upload.launch()
        copy_tables(self._tables, self.step.inputs)
        self.step.first()

    def _rest(self) -> None:
        self.step.rest()
        if self.context is not None:
            self.context.run()
        self._results.launch()

    def _launch_observe(self) -> None:
        assert self._following is not None
        self._following.launch()
        self._observing.run()

    def choose(self, rows: Mapping[int, Row]) -> None:
        """The choice after these rows is not the largest logit but as they ask for it."""
        tokens = self.step.buffers.tokens
        at = torch.tensor(list(rows), device=tokens.device)
        tokens[at] = choose(self.logits[at], list(rows.values())).int()
        self._results.launch()
        self._results.mark()

    def chosen(self) -> list[int]:
        """The choice after every row, once it is there."""
        return self.step.buffers.chosen(self._results.finish())

    def experts(self) -> float:
        """That were read a layer, on average, by the step whose choices were asked for last."""
        return self.step.buffers.distinct_experts(self._results.finish())

    @property
    def logits(self) -> Tensor:
        """[T, vocab] fp32"""
        assert self.step.buffers.best.logits is not None
        return self.step.buffers.best.logits

    def watch(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """tokens[b] follow the first rows of sequence b, one each; rows behind them were rejected."""
        if self._following is None:
            return
        bucket, numbers = self.bucket, self._following.open()
        last_rows, places = numbers[bucket.tokens :].reshape(2, bucket.sequences)
        places.fill(self._nobody)
        for b, (slot, after) in enumerate(zip(slots, tokens, strict=True)):
            if not after:
                continue
            numbers[b * bucket.rows : b * bucket.rows + len(after)] = after
            last_rows[b], places[b] = b * bucket.rows + len(after) - 1, slot
        self._observe()
        self._following.mark()


class GpuBackend:
    """Packed weights, caches, a drafting network if one was made for them, and every launch recorded."""

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        weights: StepWeights,
        step_bytes: StepBytes,
        network: Network | None = None,
        report: Report = silent,
    ) -> None:
        """Allocates what steps need and records every bucket; nothing of that happens later."""
        self.model, self.engine, self.weights, self.step_bytes, self.network = (
            model, engine, weights, step_bytes, network,
        )  # fmt: skip
        device = weights.embedding.device
        tensors = GpuCache.allocate(
            model,
            pages=engine.pages,
            slots=engine.slots,
            window=engine.window,
            device=device,
            kv_dtype=FP8 if engine.kv_dtype == "fp8" else torch.bfloat16,
        )
        self.cache = SlotCache(tensors, weights, engine.slots)
        self.snapshots = self.cache.snapshots(engine.snapshots)
        self.cache_bytes = tensor_bytes(self.cache.layers) + tensor_bytes(self.snapshots)
        width = engine.table_width(model.max_positions)
        self.tables = torch.zeros(engine.slots, width, dtype=torch.long, device=device)
        self._tokens = 0  # of the last step
        longest = min(model.max_positions, engine.pages * PAGE_SIZE)
        recorder = Recorder(device, later=True)
        self._buckets = step_buckets(engine.slots, engine.window, longest)
        self.programs = self._programs(recorder)
        self.cache.record(recorder)
        if network:
            network.bind(self.tables, recorder, longest)
        self.prompts = Prompts(
            model, engine, weights, self.cache, self.snapshots, network, self.tables, longest, recorder
        )
        recorder.finish(partial(report, RECORDING))
        self.graphs = recorder.count
        self._last: tuple[Program, list[int]] | None = None  # program and slots of the last forward, if it was a step

    def _programs(self, recorder: Recorder) -> list[Program]:
        model, weights, network = self.model, self.weights, self.network
        device = self.tables.device
        buffers = StepBuffers.shared(model, self._buckets, len(weights.layers), device, logits=True)
        taps = network.taps if network else ()
        most = max(bucket.tokens for bucket in self._buckets)
        features = torch.zeros(most, len(taps) * model.hidden_size, dtype=torch.bfloat16, device=device)

        def program(bucket: Bucket, own: StepBuffers) -> Program:
            numbers = StepInputs.numbers(bucket, device)
            inputs = StepInputs.over(numbers, bucket, PAGE_SIZE)
            step = Step(
                model, weights, self.cache.tensors, bucket, taps=taps, inputs=inputs, buffers=own, features=features
            )
            return Program(step, self.tables, Upload(numbers), recorder)

        programs = [program(bucket, own) for bucket, own in zip(self._buckets, buffers, strict=True)]
        largest = max(programs, key=lambda program: program.bucket.tokens)
        if isinstance(network, GpuDFlash):
            memory = DFlashObserve(network.network, largest.step.features, largest.step.inputs)
            for each in programs:
                each.context = DFlashObserve(network.network, each.step.features, each.step.inputs, memory)
        for each in programs:
            each.record()
        if isinstance(network, GpuMtp):
            network.network.joined(most)  # the others take a part of it
            passes = StepBuffers.shared(model, self._buckets, 1, device, logits=False)
            for each, own in zip(programs, passes, strict=True):
                each.follow(network, own)
        return programs

    # -- computing

    @property
    def keeps_inside(self) -> bool:
        return True

    def prompt_groups(self, chunks: Sequence[Chunk]) -> list[Sequence[Chunk]]:
        return [chunks[start : start + MOST_PARTS] for start in range(0, len(chunks), MOST_PARTS)]

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        self.prompts.run(chunks)
        self._last = None

    def wait(self) -> None:
        if self.tables.is_cuda:
            torch.cuda.current_stream(self.tables.device).synchronize()

    def prompt_logits(self, index: int, start: int, stop: int) -> Tensor:
        return self.prompts.logits_of(index, start, stop)

    def first_tokens(self) -> Choices:
        return self.prompts.first_tokens()

    def step_groups(self, entries: Sequence[StepTokens]) -> list[list[StepTokens]]:
        """That fit a bucket each."""
        return [
            group
            for part in split_rows(entries)
            for group in fitting(self._buckets, part, lambda entry: len(entry.tokens), _reach)
        ]

    def step(self, entries: Sequence[StepTokens]) -> None:
        program = self._program(len(entries), max(len(entry.tokens) for entry in entries), max(map(_reach, entries)))
        self._forward(program, entries)
        special = {
            b * program.bucket.rows + place: row
            for b, entry in enumerate(entries)
            if entry.verifies and (entry.masks or not is_plain(entry.request.sampling))
            for place, row in enumerate(entry.rows())
        }
        if special:
            program.choose(special)
        self._tokens = sum(len(entry.tokens) for entry in entries)
        self._last = program, [entry.request.slot for entry in entries]

    def choices(self) -> Choices:
        assert self._last is not None
        program, slots = self._last
        return Choices(program.chosen(), program.logits, [b * program.bucket.rows for b in range(len(slots))])

    def observe(self, following: Sequence[Sequence[int]]) -> None:
        if self._last is None:
            self.prompts.show(following)
        else:
            program, slots = self._last
            program.watch(slots, following)

    def distinct_experts(self, tokens: int) -> float | None:
        """In the last step, if that was one over so many tokens. Of more than eight it is an upper bound: an expert
        of more than eight of them counts once for every eight, as often as the kernels ask for it."""
        return self._last[0].experts() if self._last and self._tokens == tokens else None

    # -- remembering

    def reset(self, slot: int) -> None:
        """Pages are overwritten before they are read, the drafting network's too."""
        self.cache.reset(slot)

    def save(self, slot: int, index: int, pending: int = 0) -> None:
        self.snapshots.save(self.cache, slot, index, pending)

    def restore(self, slot: int, index: int) -> None:
        self.snapshots.restore(self.cache, slot, index)

    def release_memory(self, pages: Sequence[int]) -> int:
        return 0

    def _forward(self, program: Program, entries: Sequence[StepTokens]) -> None:
        rows = []
        for entry in entries:
            request = entry.request
            replay = self.cache.pending(request.slot, request.computed)
            rows.append((entry.tokens, request.slot, request.computed, replay))
        program.forward(rows)
        for entry in entries:
            self.cache.holds(entry.request.slot, entry.request.computed)

    def _program(self, count: int, rows: int, keys: int) -> Program:
        index = smallest(self._buckets, count, rows, keys)
        if index is None:
            raise ValueError(f"no bucket holds {count} sequences of {rows} rows and {keys} keys")
        return self.programs[index]


def _reach(entry: StepTokens) -> int:
    """Keys there are after this step."""
    return entry.request.computed + len(entry.tokens)
