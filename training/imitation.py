"""What the MTP head is taught: the trunk's own next-token distribution, several drafts deep, each pass fed with the one
before as in drafting."""

import torch
import torch.nn.functional as F
from torch import Tensor

from training.model import Model

DEPTH_WEIGHTS = (1.0, 0.8, 0.3)


def imitation(logits: Tensor, wanted: Tensor, weights: Tensor, sharpness: float = 1.0) -> Tensor:
    """Cross entropy against the trunk's distribution at the same place: logits both [B, T, V], weights [B, T]. The
    trunk's are multiplied by `sharpness`: above 1 the likeliest token counts for more, the tail for less."""
    target = torch.softmax(sharpness * wanted.float(), dim=-1)
    losses = -(target * F.log_softmax(logits.float(), dim=-1)).sum(-1)
    return (losses * weights).sum() / weights.sum().clamp(min=1.0)


def draft_loss(
    model: Model, inputs: Tensor, hidden: Tensor, wanted: Tensor, weights: Tensor, sharpness: float = 1.0
) -> dict[str, Tensor]:
    """Of drafts at every place of `inputs` [B, T]: the loss, the head's balancing loss, and how often each draft agrees
    with the trunk, whose `hidden` and logits `wanted` are taken as given."""
    best = wanted.argmax(-1)
    depth = len(DEPTH_WEIGHTS)
    length = inputs.shape[1] - depth  # rows whose every draft has a known outcome
    embeddings = [model.embed_tokens(inputs[:, 1 + ahead : 1 + ahead + length]) for ahead in range(depth)]
    outputs, spread = model.mtp(embeddings, hidden[:, :length])
    total = hidden.new_zeros((), dtype=torch.float32)
    found: dict[str, Tensor] = {}
    for ahead, (out, share) in enumerate(zip(outputs, DEPTH_WEIGHTS, strict=True)):
        rows = slice(1 + ahead, 1 + ahead + length)  # draft at t guesses what the trunk says at t + 1 + ahead
        logits = model.lm_head(out)
        total = total + share * imitation(logits, wanted[:, rows], weights[:, rows], sharpness)
        read = weights[:, rows] > 0.5  # what the assistant writes
        hits = (logits.argmax(-1) == best[:, rows])[read].float()
        found[f"agree_{ahead + 1}"] = hits.mean()
    return {"loss": total, "spread": spread, **found}
