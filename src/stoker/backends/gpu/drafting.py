"""Drafting networks on the GPU: requests in, drafts out, one read by the host.

The backend shows them each step's own tensors.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from stoker.backends.family import PAGE_SIZE
from stoker.backends.gpu.buckets import ROWS, fitting, sequence_counts, smallest, split_counts
from stoker.backends.gpu.dflash import BlockBuffers, DFlashNetwork, DFlashPropose, DFlashWeights
from stoker.backends.gpu.graphs import Download, Recorder, Upload
from stoker.backends.gpu.kernels.launch import MAX_TOKENS
from stoker.backends.gpu.mtp import Mtp, MtpPropose, mtp_bytes
from stoker.backends.gpu.state import Bucket, StepBuffers, StepInputs
from stoker.backends.gpu.weights import StepWeights
from stoker.sampling.sampler import Row, choose
from stoker.sampling.settings import Sampling
from stoker.speculate.depth.cost import DraftCost
from stoker.speculate.drafter import DraftRequest, draft_row
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import ModelConfig


def is_plain(sampling: Sampling) -> bool:
    """Whether the largest logit is the choice."""
    return sampling.temperature == 0.0 and not sampling.shapes


class _Program:
    """One bucket of a drafter: its inputs, and the pages of its sequences."""

    def __init__(self, bucket: Bucket, tables: Tensor) -> None:
        self.bucket = bucket
        numbers = StepInputs.numbers(bucket, tables.device)
        self.inputs = StepInputs.over(numbers, bucket, PAGE_SIZE)
        self.upload = Upload(numbers)
        self._tables = tables

    def begin(self) -> None:
        """Of a recording: the numbers that `fill` wrote, and pages."""
        self.upload.launch()
        copy_tables(self._tables, self.inputs)

    def fill(self, rows: Sequence[tuple[list[int], int, int, int, int]]) -> None:
        """Of each sequence: token ids, slot, cached, length and replay."""
        fill_numbers(self.upload, self.bucket, rows)


class GpuMtp:
    """The model's MTP head. The backend binds it before the first request."""

    taps: tuple[int, ...] = ()

    def __init__(self, config: ModelConfig, weights: StepWeights, pages: int, slots: int, max_depth: int) -> None:
        self.network, self._max_depth, self._slots = Mtp(config, weights, pages, slots), max_depth, slots
        assert weights.mtp is not None
        assert config.moe is not None
        moe = weights.mtp.layer.moe
        experts = config.moe.top_k * (moe.gate_up.nbytes + moe.down.nbytes) // config.moe.num_experts
        self.cost = DraftCost(token=mtp_bytes(weights.mtp) + experts + weights.head.nbytes)
        self._programs: list[_MtpProgram] = []

    def bind(self, tables: Tensor, recorder: Recorder, longest: int) -> None:
        """Records the launches. `tables` [slots, P] are the pages of each slot, for texts up to `longest` tokens."""
        buckets = [Bucket(n, 1, splits) for n in sequence_counts(self._slots) for splits in split_counts(longest)]
        own = StepBuffers.shared(self.network.config, buckets, 1, tables.device, logits=True)
        self._programs = [
            _MtpProgram(self.network, bucket, self._max_depth, tables, recorder, buffers)
            for bucket, buffers in zip(buckets, own, strict=True)
        ]

    def groups(self, requests: Sequence[DraftRequest], depths: Sequence[int]) -> list[list[int]]:
        buckets = [program.bucket for program in self._programs]
        return fitting(buckets, range(len(requests)), lambda i: 1, lambda i: requests[i].length + depths[i])

    def begin(self, requests: Sequence[DraftRequest], depths: Sequence[int]) -> "_MtpPasses":
        return _MtpPasses(_smallest(self._programs, requests, depths, rows=1), requests, depths)


class _MtpProgram(_Program):
    """Recorded passes of one bucket."""

    def __init__(
        self, network: Mtp, bucket: Bucket, depth: int, tables: Tensor, recorder: Recorder, buffers: StepBuffers
    ) -> None:
        super().__init__(bucket, tables)
        self.propose = MtpPropose(network, bucket, depth, self.inputs, buffers)
        self.results = Download(self.propose.results)
        self.first = recorder.record(self._launch_first)
        if depth > 1:  # recording runs it once, which makes the second draft
            self.next = recorder.record(self.propose.next)

    def _launch_first(self) -> None:
        self.begin()
        self.propose.first()


class _MtpPasses:
    """Drafts of some requests as a program makes them. The program outlives the requests and must not hold them."""

    def __init__(self, program: _MtpProgram, requests: Sequence[DraftRequest], depths: Sequence[int]) -> None:
        self._program, self._requests = program, requests
        self._made, self._read = 1, 0  # drafts, and how many of them the host has
        self._tokens: list[list[int]] = []
        self._sure: list[list[float]] = []
        # the head stands at the token before the newest, where it has seen the newest
        program.fill([([], r.slot, r.length - 2, 1, depth) for r, depth in zip(requests, depths, strict=True)])
        program.first()
        program.upload.mark()
        self._redraw()

    def next(self, depths: Sequence[int]) -> None:
        if any(request.sampling.penalizes or request.sampling.min_tokens for request in self._requests):
            self._fetch()
        self._program.next()
        self._made += 1
        self._redraw()

    def read(self, depths: Sequence[int]) -> tuple[list[list[int]], list[list[float]]]:
        self._fetch()
        return (
            [self._tokens[b][:depth] for b, depth in enumerate(depths)],
            [self._sure[b][:depth] for b, depth in enumerate(depths)],
        )

    def _fetch(self) -> None:
        if self._read == self._made:
            return
        host, self._read = self._program.results.read(), self._made
        self._tokens, self._sure = host[0].t().tolist(), host[1].view(torch.float32).t().tolist()

    def _redraw(self) -> None:
        """The last draft anew for requests that do not take the largest logit."""
        special = [b for b, request in enumerate(self._requests) if not is_plain(request.sampling)]
        if special:
            propose, place = self._program.propose, self._made - 1
            own = propose.buffers
            assert own.best.logits is not None
            at = torch.tensor(special, device=own.tokens.device)
            # only settings that look at drafts need to know them; for others it is enough how many there are
            before = [self._tokens[b][:place] if self._read else [0] * place for b in special]
            rows = [draft_row(self._requests[b], drafts) for b, drafts in zip(special, before, strict=True)]
            tokens, sure = _drawn(own.best.logits[at], rows)
            own.tokens[at] = tokens
            propose.tokens[place, at] = tokens
            propose.sure[place, at] = sure


class GpuDFlash:
    """A DFlash network. The backend binds it before the first request."""

    def __init__(
        self,
        config: DFlashConfig,
        weights: DFlashWeights,
        trunk: StepWeights,
        pages: int,
        slots: int,
        max_depth: int,
    ) -> None:
        self.config, self.taps = config, config.taps
        self._max_depth, self._slots = min(max_depth, config.block_size - 1), slots
        self.network = DFlashNetwork(config, weights, trunk, pages)
        self.cost = DraftCost(block=weights.nbytes + trunk.head.nbytes)
        self._programs: list[_DFlashProgram] = []

    def bind(self, tables: Tensor, recorder: Recorder, longest: int) -> None:
        """As that of an MTP head."""
        most = self._max_depth + 1
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

    def groups(self, requests: Sequence[DraftRequest], depths: Sequence[int]) -> list[list[int]]:
        buckets = [program.bucket for program in self._programs]
        return fitting(buckets, range(len(requests)), lambda i: depths[i] + 1, lambda i: requests[i].length + depths[i])

    def blocks(
        self, requests: Sequence[DraftRequest], depths: Sequence[int]
    ) -> tuple[list[list[int]], list[list[float]]]:
        program = _smallest(self._programs, requests, depths, rows=max(depths) + 1)
        mask = self.config.mask_token_id
        program.fill(
            [
                ([request.output[-1], *[mask] * depth], request.slot, request.length - 1, depth + 1, 0)
                for request, depth in zip(requests, depths, strict=True)
            ]
        )
        program.run()
        program.upload.mark()
        for b, (request, depth) in enumerate(zip(requests, depths, strict=True)):
            if not is_plain(request.sampling):
                program.redraw(b, request, depth)
        tokens, sure = program.read()
        return (
            [tokens[b][1 : depth + 1] for b, depth in enumerate(depths)],
            [sure[b][1 : depth + 1] for b, depth in enumerate(depths)],
        )


class _DFlashProgram(_Program):
    def __init__(
        self, network: DFlashNetwork, bucket: Bucket, tables: Tensor, recorder: Recorder, buffers: BlockBuffers
    ) -> None:
        super().__init__(bucket, tables)
        self._propose = DFlashPropose(network, bucket, self.inputs, buffers)
        self._results = Download(self._propose.results)
        self.run = recorder.record(self._run)

    def _run(self) -> None:
        self.begin()
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


Network = GpuMtp | GpuDFlash
_AnyProgram = TypeVar("_AnyProgram", bound=_Program)


def _smallest(
    programs: Sequence[_AnyProgram], requests: Sequence[DraftRequest], depths: Sequence[int], rows: int
) -> _AnyProgram:
    """That holds these requests, which `fitting` has made sure of."""
    keys = max(request.length + depth for request, depth in zip(requests, depths, strict=True))
    index = smallest([program.bucket for program in programs], len(requests), rows, keys)
    assert index is not None
    return programs[index]


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
    """Of each sequence: token ids, slot, cached, length and replay. What pads the batch has no tokens. They are sent by
    whoever launches what reads them."""
    numbers, count = upload.open(), bucket.sequences
    each = numbers[bucket.tokens :].reshape(4, count)
    for b, (ids, *values) in enumerate(rows):
        numbers[b * bucket.rows : b * bucket.rows + len(ids)] = ids
        each[:, b] = values
