"""Drafting networks on the GPU as the engine asks them: requests in, drafts out, one read by the host.

The runner shows them each step's own tensors, so `observe` has nothing left to do.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stoker.backends.cpu.batch import Batch
from stoker.backends.family import PAGE_SIZE
from stoker.backends.gpu.buckets import ROWS, fitting, sequence_counts, smallest, split_counts
from stoker.backends.gpu.dflash import BlockBuffers, DFlashNetwork, DFlashPropose, DFlashWeights
from stoker.backends.gpu.graphs import Download, Recorder, Upload
from stoker.backends.gpu.int4 import MAX_TOKENS
from stoker.backends.gpu.mtp import Mtp, MtpPropose, mtp_bytes
from stoker.backends.gpu.state import Bucket, StepBuffers, StepInputs
from stoker.backends.gpu.weights import StepWeights
from stoker.sampling.sampler import Row, choose
from stoker.sampling.settings import Sampling
from stoker.speculate.depth.cost import DraftCost
from stoker.speculate.draft import Draft, GoOn
from stoker.speculate.draft_head import draft_row
from stoker.speculate.drafter import DraftRequest
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import ModelConfig


def is_plain(sampling: Sampling) -> bool:
    """Whether the largest logit is the choice."""
    return sampling.temperature == 0.0 and not sampling.shapes


class GpuDrafter:
    """What both have in common. `bind` comes before the first request."""

    taps: tuple[int, ...] = ()
    observes = False
    max_depth: int
    costs: Mapping[str, DraftCost]
    source: str

    def observe(self, batch: Batch, hidden: Tensor, taps: Tensor, following: Tensor) -> None:
        """The runner has shown it the step already."""

    def reset(self, slot: int) -> None:
        """Pages are overwritten before they are read."""

    def flush(self, slot: int) -> None:
        """Nothing waits."""

    def bind(self, tables: Tensor, recorder: Recorder, longest: int) -> None:
        """Records the launches. `tables` [slots, P] are the pages of each slot, for texts up to `longest` tokens."""
        raise NotImplementedError

    def propose(self, requests: Sequence[DraftRequest], go_on: GoOn | None = None) -> list[Draft]:
        found = [Draft() for _ in requests]
        live = [i for i, request in enumerate(requests) if request.depth > 0 and not request.free_only]
        for group in fitting(
            self._buckets,
            live,
            lambda i: self._rows(requests[i]),
            lambda i: requests[i].length + self._depth(requests[i]),
        ):
            self._draft(requests, group, found, go_on)
        return found

    @property
    def _buckets(self) -> Sequence[Bucket]:
        raise NotImplementedError

    def _rows(self, request: DraftRequest) -> int:
        raise NotImplementedError

    def _draft(
        self, requests: Sequence[DraftRequest], group: Sequence[int], found: list[Draft], go_on: GoOn | None
    ) -> None:
        raise NotImplementedError

    def _depth(self, request: DraftRequest) -> int:
        return min(request.depth, self.max_depth)


class _Program:
    """One bucket of a drafter: its inputs, and the pages of its sequences."""

    def __init__(self, bucket: Bucket, tables: Tensor) -> None:
        self.bucket = bucket
        numbers = StepInputs.numbers(bucket, tables.device)
        self.inputs = StepInputs.over(numbers, bucket, PAGE_SIZE)
        self.upload = Upload(numbers)
        self._tables = tables

    def find_pages(self) -> None:
        copy_tables(self._tables, self.inputs)

    def fill(self, rows: Sequence[tuple[list[int], int, int, int, int]]) -> None:
        """Of each sequence: token ids, slot, cached, length and replay."""
        fill_numbers(self.upload, self.bucket, rows)


class MtpDrafter(GpuDrafter):
    """Depths beyond one feed the head with its own draft. Asked whether to go on, it reads a few numbers after each."""

    source = "mtp"

    def __init__(self, config: ModelConfig, weights: StepWeights, pages: int, slots: int, max_depth: int) -> None:
        self.network, self.max_depth, self._slots = Mtp(config, weights, pages, slots), max_depth, slots
        assert weights.mtp is not None
        assert config.moe is not None
        moe = weights.mtp.layer.moe
        experts = config.moe.top_k * (moe.gate_up.nbytes + moe.down.nbytes) // config.moe.num_experts
        self.costs = {self.source: DraftCost(token=mtp_bytes(weights.mtp) + experts + weights.head.nbytes)}
        self._programs: list[_MtpProgram] = []

    def bind(self, tables: Tensor, recorder: Recorder, longest: int) -> None:
        buckets = [Bucket(n, 1, splits) for n in sequence_counts(self._slots) for splits in split_counts(longest)]
        own = StepBuffers.shared(self.network.config, buckets, 1, tables.device, logits=True)
        self._programs = [
            _MtpProgram(self.network, bucket, self.max_depth, tables, recorder, buffers)
            for bucket, buffers in zip(buckets, own, strict=True)
        ]

    @property
    def _buckets(self) -> Sequence[Bucket]:
        return [program.bucket for program in self._programs]

    def _rows(self, request: DraftRequest) -> int:
        return 1

    def _draft(
        self, requests: Sequence[DraftRequest], group: Sequence[int], found: list[Draft], go_on: GoOn | None
    ) -> None:
        mine = [requests[i] for i in group]
        depths = [self._depth(request) for request in mine]
        index = smallest(self._buckets, len(mine), 1, max(r.length + d for r, d in zip(mine, depths, strict=True)))
        assert index is not None
        program = self._programs[index]
        # the head stands at the token before the newest, where it has seen the newest
        program.fill([([], r.slot, r.length - 2, 1, depth) for r, depth in zip(mine, depths, strict=True)])
        looks = go_on is not None or any(r.sampling.penalizes or r.sampling.min_tokens for r in mine)
        drafts: list[list[int]] = [[] for _ in mine]
        sure: list[list[float]] = [[] for _ in mine]
        program.first()
        for place in range(max(depths)):
            if place:
                program.next()
            program.redraw(place, mine, drafts if looks else [[0] * place for _ in mine])
            if looks and place + 1 < max(depths):
                drafts, sure = program.read(depths, place + 1)
                if go_on is not None:
                    so_far = [Draft() for _ in found]
                    for i, tokens, chances in zip(group, drafts, sure, strict=True):
                        so_far[i] = Draft(tokens, chances, self.source)
                    wanted = go_on(so_far)
                    depths = [
                        depth if wanted[i] else min(depth, place + 1) for i, depth in zip(group, depths, strict=True)
                    ]
                    if max(depths) == place + 1:
                        break
        drafts, sure = program.read(depths, max(depths))
        for i, tokens, chances in zip(group, drafts, sure, strict=True):
            found[i] = Draft(tokens, chances, self.source)


class _MtpProgram(_Program):
    def __init__(
        self, network: Mtp, bucket: Bucket, depth: int, tables: Tensor, recorder: Recorder, buffers: StepBuffers
    ) -> None:
        super().__init__(bucket, tables)
        self._propose = MtpPropose(network, bucket, depth, self.inputs, buffers)
        self._results = Download(self._propose.results)
        self.first = recorder.record(self._first)
        if depth > 1:  # recording runs it once, which makes the second draft
            self.next = recorder.record(self._propose.next)

    def _first(self) -> None:
        self.find_pages()
        self._propose.first()

    def redraw(self, place: int, requests: Sequence[DraftRequest], drafts: Sequence[Sequence[int]]) -> None:
        """Draft `place` anew for requests that do not take the largest logit."""
        special = [b for b, request in enumerate(requests) if not is_plain(request.sampling)]
        if special:
            own = self._propose.buffers
            assert own.best.logits is not None
            at = torch.tensor(special, device=own.tokens.device)
            rows = [draft_row(requests[b], drafts[b][:place]) for b in special]
            tokens, sure = _drawn(own.best.logits[at], rows)
            own.tokens[at] = tokens
            self._propose.tokens[place, at] = tokens
            self._propose.sure[place, at] = sure

    def read(self, depths: Sequence[int], made: int) -> tuple[list[list[int]], list[list[float]]]:
        """The first of what was made, up to each request's depth."""
        host = self._results.read()
        tokens, sure = host[0].t().tolist(), host[1].view(torch.float32).t().tolist()
        shown = [min(depth, made) for depth in depths]
        return [tokens[b][:n] for b, n in enumerate(shown)], [sure[b][:n] for b, n in enumerate(shown)]


class DFlashDrafter(GpuDrafter):
    """One pass for a whole block."""

    source = "dflash"

    def __init__(
        self,
        config: DFlashConfig,
        weights: DFlashWeights,
        trunk: StepWeights,
        pages: int,
        slots: int,
        max_depth: int,
    ) -> None:
        self.taps = config.taps
        self.max_depth, self._slots = min(max_depth, config.block_size - 1), slots
        self.network = DFlashNetwork(config, weights, trunk, pages)
        self.costs = {self.source: DraftCost(block=weights.nbytes + trunk.head.nbytes)}
        self._programs: list[_DFlashProgram] = []

    def bind(self, tables: Tensor, recorder: Recorder, longest: int) -> None:
        most = self.max_depth + 1
        buckets = [
            Bucket(count, rows, splits)
            for splits in split_counts(longest)
            for count in sequence_counts(self._slots)
            for rows in [*(rows for rows in ROWS if 1 < rows < most), most]
            if count == 1 or count * rows <= MAX_TOKENS
        ]
        buckets.sort(key=lambda bucket: (bucket.tokens, bucket.splits))
        own = BlockBuffers.shared(self.network, buckets)
        self._programs = [
            _DFlashProgram(self.network, bucket, tables, recorder, buffers)
            for bucket, buffers in zip(buckets, own, strict=True)
        ]

    @property
    def _buckets(self) -> Sequence[Bucket]:
        return [program.bucket for program in self._programs]

    def _rows(self, request: DraftRequest) -> int:
        return self._depth(request) + 1

    def _draft(
        self, requests: Sequence[DraftRequest], group: Sequence[int], found: list[Draft], go_on: GoOn | None
    ) -> None:
        mine = [requests[i] for i in group]
        depths = [self._depth(request) for request in mine]
        keys = max(request.length + depth for request, depth in zip(mine, depths, strict=True))
        index = smallest(self._buckets, len(mine), max(depths) + 1, keys)
        assert index is not None
        program = self._programs[index]
        mask = self.network.config.mask_token_id
        program.fill(
            [
                ([request.output[-1], *[mask] * depth], request.slot, request.length - 1, depth + 1, 0)
                for request, depth in zip(mine, depths, strict=True)
            ]
        )
        program.run()
        for b, (request, depth) in enumerate(zip(mine, depths, strict=True)):
            if not is_plain(request.sampling):
                program.redraw(b, request, depth)
        tokens, sure = program.read()
        for b, (i, depth) in enumerate(zip(group, depths, strict=True)):
            found[i] = Draft(tokens[b][1 : depth + 1], sure[b][1 : depth + 1], self.source)


class _DFlashProgram(_Program):
    def __init__(
        self, network: DFlashNetwork, bucket: Bucket, tables: Tensor, recorder: Recorder, buffers: BlockBuffers
    ) -> None:
        super().__init__(bucket, tables)
        self._propose = DFlashPropose(network, bucket, self.inputs, buffers)
        self._results = Download(self._propose.results)
        self.run = recorder.record(self._run)

    def _run(self) -> None:
        self.find_pages()
        self._propose.run()

    def redraw(self, b: int, request: DraftRequest, depth: int) -> None:
        """Drafts of a request that does not take the largest logit; one by one where penalties count earlier ones."""
        own, first = self._propose, b * self.bucket.rows + 1
        if not request.sampling.penalizes:
            rows = [draft_row(request, [0] * place) for place in range(depth)]
            own.tokens[b, 1 : depth + 1], own.sure[b, 1 : depth + 1] = _drawn(own.logits[first : first + depth], rows)
            return
        drafts: list[int] = []
        for place in range(depth):
            token, sure = _drawn(own.logits[first + place : first + place + 1], [draft_row(request, drafts)])
            own.tokens[b, place + 1], own.sure[b, place + 1] = token[0], sure[0]
            drafts.append(int(token[0]))

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        """By sequence and row."""
        shape = (self.bucket.sequences, self.bucket.rows)
        host = self._results.read()
        return host[0].view(shape).tolist(), host[1].view(torch.float32).view(shape).tolist()


def _drawn(logits: Tensor, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Tokens int32 [n] chosen as the model would choose them, and their probabilities."""
    tokens = choose(logits, rows)
    sure = (logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)).exp()
    return tokens.int(), sure


def copy_tables(tables: Tensor, inputs: StepInputs) -> None:
    """The pages of a batch's slots, from those of all slots [slots, P]."""
    width = min(tables.shape[1], inputs.tables.shape[1])
    inputs.tables[:, :width].copy_(tables[:, :width].index_select(0, inputs.sequences.slots))


def fill_numbers(upload: Upload, bucket: Bucket, rows: Sequence[tuple[list[int], int, int, int, int]]) -> None:
    """Of each sequence: token ids, slot, cached, length and replay. What pads the batch has no tokens."""
    numbers, count = upload.open(), bucket.sequences
    each = numbers[bucket.tokens :].reshape(4, count)
    for b, (ids, *values) in enumerate(rows):
        numbers[b * bucket.rows : b * bucket.rows + len(ids)] = ids
        each[:, b] = values
    upload.send()
