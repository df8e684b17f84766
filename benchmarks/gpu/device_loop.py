"""Steps of one batch that stays the same, without a host between them: which drafts a step keeps, what the next one
starts from, and drafts for it; on the device, over fixed tensors. The engine that is served has a loop of its own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.accept_kernels import accept_drafts, advance_inputs
from stoker.backends.gpu.dflash import DFlashNetwork, DFlashObserve, DFlashPropose, DFlashWeights
from stoker.backends.gpu.mtp import Mtp, MtpObserve, MtpPropose
from stoker.backends.gpu.state import Bucket, StepBuffers
from stoker.backends.gpu.step import Step
from stoker.weights.dflash_config import DFlashConfig


@dataclass(frozen=True)
class Accepted:
    """What the host reads of a step: `counts` [B] tokens each sequence gained, `tokens` [B, rows] of which they are the
    first; and `last_rows` [B], the row of the last accepted token."""

    counts: Tensor  # int32
    tokens: Tensor  # int32
    last_rows: Tensor  # int64

    @classmethod
    def allocate(cls, step: Step) -> "Accepted":
        bucket, device = step.bucket, step.weights.embedding.device
        return cls(
            torch.zeros(bucket.sequences, dtype=torch.int32, device=device),
            torch.zeros(bucket.sequences, bucket.rows, dtype=torch.int32, device=device),
            torch.zeros(bucket.sequences, dtype=torch.int64, device=device),
        )


def accept(step: Step, accepted: Accepted, assumed: Tensor | None = None) -> None:
    """Keeps the drafts that agree with the model's choice before them, and the choice after the last of those.

    `assumed` [B] int32 is taken for the counts instead, to measure speed at a given acceptance with random weights.
    """
    ids, chosen = (tensor.view(accepted.tokens.shape) for tensor in (step.inputs.token_ids, step.buffers.tokens))
    accept_drafts(ids, chosen, accepted.counts, accepted.tokens, accepted.last_rows, assumed, step.pdl)


def advance(step: Step, accepted: Accepted, drafts: Tensor | None) -> None:
    """The next step: it replays what was accepted, and computes the newest token and the drafts after it."""
    ids, sequences = step.inputs.token_ids.view(accepted.tokens.shape), step.inputs.sequences
    advance_inputs(accepted.counts, accepted.tokens, drafts, ids, sequences.cached, sequences.replay, step.pdl)


class MtpDraft:
    """`depth` drafts after each step of one batch that stays the same; `drafts` [B, depth] int32."""

    def __init__(self, step: Step, pages: int, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"a draft has one or more tokens, not {depth}")
        bucket, device = step.bucket, step.weights.embedding.device
        mtp = Mtp(step.config, step.weights, pages, bucket.sequences, step.pdl)
        one = Bucket(bucket.sequences, 1, bucket.splits)
        self._step, self._observe = step, MtpObserve(mtp, step)
        buffers = StepBuffers.allocate(step.config, one, 1, device)
        self._propose = MtpPropose(mtp, one, depth, buffers=buffers)
        order = torch.arange(bucket.sequences, device=device)
        self._observe.slots.copy_(order)
        self._propose.inputs.sequences.slots.copy_(order)
        self._propose.depths.fill_(depth)

    @property
    def drafts(self) -> Tensor:
        return self._propose.tokens.t()

    def draft(self, last_rows: Tensor) -> None:
        """`last_rows` [B] int64: each sequence's last accepted row of the step just made."""
        step, propose = self._step, self._propose
        self._observe.following.copy_(step.buffers.tokens)
        self._observe.last_rows.copy_(last_rows)
        self._observe.run()
        propose.inputs.tables.copy_(step.inputs.tables)
        place = last_rows.remainder(step.bucket.rows).int()
        torch.add(step.inputs.sequences.cached, place, out=propose.inputs.sequences.cached)
        propose.first()
        for _ in range(1, propose.depth):
            propose.next()


class DFlashDraft:
    """`depth` drafts after each step of one batch that stays the same; `drafts` [B, depth] int32."""

    def __init__(self, step: Step, config: DFlashConfig, weights: DFlashWeights, pages: int, depth: int) -> None:
        if not 1 <= depth < config.block_size:
            raise ValueError(f"a block of {config.block_size} drafts 1 to {config.block_size - 1} tokens, not {depth}")
        drafter = DFlashNetwork(config, weights, step.weights, pages, step.pdl)
        bucket = Bucket(step.bucket.sequences, depth + 1, step.bucket.splits)
        self._step, self._observe, self._propose = (
            step,
            DFlashObserve(drafter, step.features, step.inputs),
            DFlashPropose(drafter, bucket),
        )
        self._propose.inputs.token_ids.fill_(config.mask_token_id)

    @property
    def drafts(self) -> Tensor:
        return self._propose.tokens[:, 1:]

    def draft(self, last_rows: Tensor) -> None:
        """`last_rows` [B] int64: each sequence's last accepted row of the step just made."""
        step, inputs = self._step, self._propose.inputs
        self._observe.run()
        inputs.tables.copy_(step.inputs.tables)
        inputs.token_ids.view(-1, self._propose.bucket.rows)[:, 0].copy_(step.buffers.tokens.index_select(0, last_rows))
        place = last_rows.remainder(step.bucket.rows).int() + 1
        torch.add(step.inputs.sequences.cached, place, out=inputs.sequences.cached)
        self._propose.run()
