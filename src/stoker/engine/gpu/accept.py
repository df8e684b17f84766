"""Which drafts a step keeps, and what the next step starts from; on the device, over fixed tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.engine.gpu.step import Step


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
    rows = step.bucket.rows
    tokens = step.buffers.tokens.view(-1, rows)
    accepted.tokens.copy_(tokens)
    if rows == 1:
        accepted.counts.fill_(1)
    elif assumed is None:
        drafts = step.inputs.token_ids.view(-1, rows)[:, 1:]
        right = (drafts == tokens[:, :-1]).int().cumprod(1).sum(1)
        accepted.counts.copy_(right + 1)
    else:
        accepted.counts.copy_(assumed)
    first = torch.arange(step.bucket.sequences, device=tokens.device) * rows
    torch.add(first - 1, accepted.counts, out=accepted.last_rows)


def advance(step: Step, accepted: Accepted, drafts: Tensor | None) -> None:
    """The next step: it replays what was accepted, and computes the newest token and the drafts after it."""
    rows = step.bucket.rows
    sequences = step.inputs.sequences
    sequences.cached.add_(accepted.counts)
    sequences.replay.copy_(accepted.counts)
    ids = step.inputs.token_ids.view(-1, rows)
    newest = accepted.tokens.gather(1, (accepted.counts - 1).long()[:, None])
    ids[:, :1].copy_(newest)
    if drafts is not None:
        ids[:, 1:].copy_(drafts)
