"""Trains the MTP head on a frozen trunk: python -m training.train_mtp --weights TRUNK --run build/training/mtp

It learns the trunk's own next-token distribution, three drafts deep, each pass fed with the one before as in drafting.
The run directory holds trunk and head together. With --start DIR it goes on from the head of another run or checkpoint.
"""

import torch
from torch import Tensor

from training import loop
from training.imitation import draft_loss
from training.model import Model
from training.quantize import train_for_int4
from training.state import fill, fill_mtp, load_weights
from training.train_trunk import prepare


def loss_of(model: Model, tokens: Tensor, weights: Tensor, balance: float, sharpness: float = 1.0) -> dict[str, Tensor]:
    inputs = tokens[:, :-1]
    with torch.no_grad():
        hidden = model(inputs).hidden
        wanted = model.lm_head(hidden)  # row t: the trunk's view of token t + 1
    found = draft_loss(model, inputs, hidden, wanted, weights, sharpness)
    found["loss"] = found["loss"] + balance * found.pop("spread")
    return found


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
        lambda tokens, weights: loss_of(model, tokens, weights, plan.balance, plan.sharpness),
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
