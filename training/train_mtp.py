"""Trains the MTP head on a frozen trunk: python -m training.train_mtp --weights TRUNK --run build/training/mtp

It learns the trunk's own next-token distribution, three drafts deep, each pass fed with the one before as in drafting.
The run directory holds trunk and head together. With --start DIR it goes on from the head of another run or checkpoint.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from training import loop
from training.model import Model
from training.quantize import train_for_int4
from training.state import fill, fill_mtp, load_weights
from training.train_trunk import prepare

DEPTH_WEIGHTS = (1.0, 0.8, 0.3)
SHARPNESS = 2.0  # the trunk's logits times this: a draft counts if it is the likeliest token, the tail does not


def imitation(logits: Tensor, wanted: Tensor, weights: Tensor, sharpness: float = 1.0) -> Tensor:
    """Cross entropy against the trunk's distribution at the same place: logits both [B, T, V], weights [B, T]."""
    target = torch.softmax(sharpness * wanted.float(), dim=-1)
    losses = -(target * F.log_softmax(logits.float(), dim=-1)).sum(-1)
    return (losses * weights).sum() / weights.sum().clamp(min=1.0)


def loss_of(model: Model, tokens: Tensor, weights: Tensor, balance: float) -> dict[str, Tensor]:
    inputs = tokens[:, :-1]
    with torch.no_grad():
        hidden = model(inputs).hidden
        wanted = model.lm_head(hidden)  # row t: the trunk's view of token t + 1
        best = wanted.argmax(-1)
    depth = len(DEPTH_WEIGHTS)
    length = inputs.shape[1] - depth  # rows whose every draft has a known outcome
    embeddings = [model.embed_tokens(inputs[:, 1 + ahead : 1 + ahead + length]) for ahead in range(depth)]
    outputs, spread = model.mtp(embeddings, hidden[:, :length])
    total = balance * spread
    found: dict[str, Tensor] = {}
    for ahead, (out, share) in enumerate(zip(outputs, DEPTH_WEIGHTS, strict=True)):
        rows = slice(1 + ahead, 1 + ahead + length)  # draft at t guesses what the trunk says at t + 1 + ahead
        logits = model.lm_head(out)
        total = total + share * imitation(logits, wanted[:, rows], weights[:, rows], SHARPNESS)
        read = weights[:, rows] > 0.5  # what the assistant writes
        hits = (logits.argmax(-1) == best[:, rows])[read].float()
        found[f"agree_{ahead + 1}"] = hits.mean()
    return {"loss": total, **found}


def main() -> None:
    plan, options = loop.parse("Trains the MTP head.", steps=2500, lr=1.5e-3, warmup=100, decay=0.5)
    if not options.weights:
        raise SystemExit("--weights is missing: give the run directory of the trained trunk.")
    model = prepare(plan)
    fill(model, load_weights(options.weights))
    if options.start:
        fill_mtp(model, load_weights(options.start))
    for parameter in model.trunk_parameters():
        parameter.requires_grad_(False)
    model.mtp.requires_grad_(True)
    if plan.int4_from < 1.0:  # the head learns from the trunk as shipped
        train_for_int4(model, plan.int4_group)
    loop.train(
        model,
        lambda tokens, weights: loss_of(model, tokens, weights, plan.balance),
        plan,
        options.run,
        options.minutes,
        loop.mixture(plan, own=True),
        exact=not options.light,
        until=options.until,
        by_clock=options.by_clock,
    )


if __name__ == "__main__":
    main()
