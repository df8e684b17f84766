"""The engine's steps on the GPU: each batch goes into the smallest bucket that holds it and runs as a recorded graph.

A step of greedy requests has two small reads by the host: the drafts (`drafters.py`) and the model's choices here. What
needs more than the largest logit is chosen by the exact sampler from the logits on the device, in the same read, which
also brings how many experts were touched.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stoker.backends.cpu.cache import FP8
from stoker.backends.family import PAGE_SIZE
from stoker.backends.gpu.buckets import fitting, smallest, step_buckets
from stoker.backends.gpu.dflash import DFlashObserve, DFlashWeights
from stoker.backends.gpu.drafters import (
    DFlashDrafter,
    MtpDrafter,
    copy_tables,
    fill_numbers,
    is_plain,
)
from stoker.backends.gpu.graphs import Download, Recorder, Upload
from stoker.backends.gpu.mtp import MtpObserve
from stoker.backends.gpu.prompts import Prompts
from stoker.backends.gpu.slots import SlotCache
from stoker.backends.gpu.state import Bucket, GpuCache, StepBuffers, StepInputs
from stoker.backends.gpu.step import Step
from stoker.backends.gpu.weights import StepWeights
from stoker.engine.block import Block
from stoker.engine.config import EngineConfig
from stoker.engine.flat import Part
from stoker.engine.outcome import Emitted, following, settle
from stoker.engine.request import Sequence as Request
from stoker.engine.scheduler import Scheduler
from stoker.sampling.sampler import Row, choose
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import ModelConfig

Network = MtpDrafter | DFlashDrafter


class GpuBackend:
    """What an engine needs to run on the GPU: packed weights, caches and, if asked for, a drafting network."""

    def __init__(self, config: ModelConfig, engine: EngineConfig, weights: StepWeights) -> None:
        self.config, self.engine, self.weights = config, engine, weights
        tensors = GpuCache.allocate(
            config,
            pages=engine.pages,
            slots=engine.slots,
            window=engine.window,
            device=weights.embedding.device,
            kv_dtype=FP8 if engine.kv_dtype == "fp8" else torch.bfloat16,
        )
        self.cache = SlotCache(tensors, weights, engine.slots)
        self.network: Network | None = None

    def draft_with_mtp(self, depth: int) -> MtpDrafter:
        """Before `runner`, like the other."""
        self.network = MtpDrafter(self.config, self.weights, self.engine.pages, self.engine.slots, depth)
        return self.network

    def draft_with_dflash(self, config: DFlashConfig, weights: DFlashWeights, depth: int) -> DFlashDrafter:
        pages, slots = self.engine.pages, self.engine.slots
        self.network = DFlashDrafter(config, weights, self.weights, pages, slots, depth)
        return self.network

    def runner(self, scheduler: Scheduler) -> "GpuRunner":
        return GpuRunner(self, scheduler)


class Program:
    """Steps of one bucket. `forward` runs what `fill` put in; `watch` then shows a MTP head the tokens that follow."""

    def __init__(self, step: Step, tables: Tensor, upload: Upload, recorder: Recorder) -> None:
        self.step, self.bucket, self._tables, self._upload = step, step.bucket, tables, upload
        self.context: DFlashObserve | None = None
        self._results, self._recorder = Download(step.buffers.results), recorder
        self._following: Upload | None = None

    def record(self) -> None:
        self.forward = self._recorder.record(self._first, self._rest)

    def follow(self, network: MtpDrafter, buffers: StepBuffers) -> None:
        """The MTP head is to see every token this program computes."""
        bucket = self.bucket
        numbers = torch.zeros(bucket.tokens + 2 * bucket.sequences, dtype=torch.int32, device=self._tables.device)
        self._following, self._nobody = Upload(numbers), len(network.network.last) - 1
        self._observe = self._recorder.record(MtpObserve(network.network, self.step, numbers, buffers).run)

    def fill(self, rows: Sequence[tuple[list[int], int, int, int]]) -> None:
        """Of each sequence: tokens, slot, tokens before them, and how many of those the state does not hold yet."""
        numbers = [(tokens, slot, cached, len(tokens), replay) for tokens, slot, cached, replay in rows]
        fill_numbers(self._upload, self.bucket, numbers)

    def _first(self) -> None:
        copy_tables(self._tables, self.step.inputs)
        self.step.first()

    def _rest(self) -> None:
        self.step.rest()
        if self.context is not None:
            self.context.run()

    def choose(self, rows: Mapping[int, Row]) -> tuple[list[int], float]:
        """The model's choice after every row, for `rows` as they ask for it; and experts a layer, on average."""
        special = [at for at, row in rows.items() if row.allowed is not None or not is_plain(row.sampling)]
        tokens = self.step.buffers.tokens
        if special:
            at = torch.tensor(special, device=tokens.device)
            tokens[at] = choose(self.logits[at], [rows[place] for place in special]).int()
        return self.step.buffers.told(self._results.read())

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
            numbers[b * bucket.rows : b * bucket.rows + len(after)] = after
            last_rows[b], places[b] = b * bucket.rows + len(after) - 1, slot
        self._following.send()
        self._observe()


class GpuRunner:
    def __init__(self, backend: GpuBackend, scheduler: Scheduler) -> None:
        """Allocates what steps need and records every bucket; nothing of that happens later."""
        self._cache, self._scheduler = backend.cache, scheduler
        self._counted = (0, 0.0)  # of the last forward: tokens, and experts a layer read
        config, engine, weights, network = backend.config, backend.engine, backend.weights, backend.network
        device = weights.embedding.device
        longest = min(config.max_positions, engine.pages * PAGE_SIZE)
        self._buckets = step_buckets(engine.slots, engine.window, longest)
        buffers = StepBuffers.shared(config, self._buckets, len(weights.layers), device, logits=True)
        recorder = Recorder(device)
        taps = network.taps if network else ()
        most = max(bucket.tokens for bucket in self._buckets)
        features = torch.zeros(most, len(taps) * config.hidden_size, dtype=torch.bfloat16, device=device)

        def program(bucket: Bucket, own: StepBuffers) -> Program:
            numbers = StepInputs.numbers(bucket, device)
            inputs = StepInputs.over(numbers, bucket, PAGE_SIZE)
            step = Step(
                config, weights, backend.cache.tensors, bucket, taps=taps, inputs=inputs, buffers=own, features=features
            )
            return Program(step, scheduler.tables, Upload(numbers), recorder)

        self.programs = [program(bucket, own) for bucket, own in zip(self._buckets, buffers, strict=True)]
        largest = max(self.programs, key=lambda program: program.bucket.tokens)
        if isinstance(network, DFlashDrafter):
            memory = DFlashObserve(network.network, largest.step.features, largest.step.inputs)
            for each in self.programs:
                each.context = DFlashObserve(network.network, each.step.features, each.step.inputs, memory)
        for each in self.programs:
            each.record()
        if isinstance(network, MtpDrafter):
            network.network.joined(most)  # the others take a part of it
            passes = StepBuffers.shared(config, self._buckets, 1, device, logits=False)
            for each, own in zip(self.programs, passes, strict=True):
                each.follow(network, own)
        if network:
            network.bind(scheduler.tables, recorder, longest)
        self.graphs = recorder.count
        self.prompts = Prompts(config, engine, weights, backend.cache, network, scheduler.tables, longest)

    def prefill(self, parts: list[Part], first_rows: dict[int, Row]) -> Emitted:
        """Prompt chunks; requests in `first_rows` end their prompt here and get their first token."""
        emitted: Emitted = []
        for part in parts:
            emitted += self.prompts.run(part, first_rows.get(part.request.id))
            self._scheduler.keep_prompt(part.request)
        return emitted

    def verify(self, blocks: list[Block]) -> Emitted:
        """One step: the newest token of each block and its drafts, or tokens to compute again."""
        emitted: Emitted = []
        for group in fitting(self._buckets, blocks, lambda block: len(block.tokens), _reach):
            emitted += self._verify(group)
        return emitted

    def distinct_experts(self, tokens: int) -> float | None:
        """In the last forward, if that was one over so many tokens. Of more than eight it is an upper bound: an expert
        of more than eight of them counts once for every eight, as often as the kernels ask for it."""
        counted, experts = self._counted
        return experts if counted == tokens else None

    def _verify(self, blocks: list[Block]) -> Emitted:
        program = self._program(len(blocks), max(len(block.tokens) for block in blocks), max(map(_reach, blocks)))
        members = [block.sequence for block in blocks]
        self._forward(program, members, [block.tokens for block in blocks])
        firsts = [b * program.bucket.rows for b in range(len(blocks))]
        rows = {
            first + place: row
            for block, first in zip(blocks, firsts, strict=True)
            if block.verifies
            for place, row in enumerate(block.rows())
        }
        choices, experts = program.choose(rows)
        self._counted = sum(len(block.tokens) for block in blocks), experts
        emitted, kept = settle(blocks, choices, program.logits, firsts)
        program.watch(
            [sequence.slot for sequence in members],
            [following([sequence], [count]) for sequence, count in zip(members, kept, strict=True)],
        )
        for sequence in members:
            if sequence.computed > len(sequence.prompt):
                self._scheduler.keep_output(sequence)
        return emitted

    def _forward(self, program: Program, members: Sequence[Request], tokens: Sequence[list[int]]) -> None:
        rows = []
        for sequence, own in zip(members, tokens, strict=True):
            replay = self._cache.pending(sequence.slot, sequence.computed)
            rows.append((own, sequence.slot, sequence.computed, replay))
        program.fill(rows)
        program.forward()
        for sequence in members:
            self._cache.holds(sequence.slot, sequence.computed)

    def _program(self, count: int, rows: int, keys: int) -> Program:
        index = smallest(self._buckets, count, rows, keys)
        if index is None:
            raise ValueError(f"no bucket holds {count} sequences of {rows} rows and {keys} keys")
        return self.programs[index]


def _reach(block: Block) -> int:
    """Keys there are after this step."""
    return block.sequence.computed + len(block.tokens)
