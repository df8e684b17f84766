"""Which drafts a step keeps, and what the next step starts from; on the device, over fixed tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.backends.gpu.kernels.accept import accept_drafts, advance_inputs
from stoker.backends.gpu.step import Step


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
