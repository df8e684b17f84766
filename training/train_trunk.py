"""Trains the trunk: python -m training.train_trunk --run build/training/trunk --minutes 9

Repeat the same command until it says that all steps are done. With --weights DIR a new run starts from the trunk of
another one (longer rows, INT4 fine-tuning). With --mtp SHARE the MTP head of --start learns together with the trunk,
whose hidden states then come to say more about the tokens after the next.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from training import loop
from training.config import SHAPES
from training.imitation import draft_loss
from training.model import Model
from training.quantize import train_for_int4
from training.state import PROGRESS, fill, fill_mtp, load_weights


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean over positions, in nats."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp(min=1.0)


def loss_of(
    model: Model, tokens: Tensor, weights: Tensor, balance: float, mtp: float = 0.0, sharpness: float = 1.0
) -> dict[str, Tensor]:
    inputs = tokens[:, :-1]
    out = model(inputs)
    logits = model.lm_head(out.hidden)
    text = cross_entropy(logits, tokens[:, 1:], weights)
    found = {"loss": text + balance * out.balance, "text": text.detach(), "balance": out.balance.detach()}
    if mtp > 0.0:
        drafts = draft_loss(model, inputs, out.hidden, logits.detach(), weights, sharpness)
        found["loss"] = found["loss"] + mtp * drafts.pop("loss") + balance * drafts.pop("spread")
        found |= drafts
    return found


def prepare(plan: loop.Plan) -> Model:
    """A new trunk on the training device. Its MTP head waits to be trained alone, or learns along."""
    torch.manual_seed(plan.seed)
    model = Model(SHAPES[plan.shape].model, dispatch=plan.dispatch)  # type: ignore[arg-type]
    model.mtp.requires_grad_(plan.mtp > 0.0)
    model.to(loop.device())
    if plan.compile:
        for layer in model.layers:  # layers of one kind share their compiled code
            layer.compile()
    return model


def int4_switch(model: Model, plan: loop.Plan) -> Callable[[int], None]:
    """Turns on INT4 rounding once the plan's share of steps is done."""
    begin = round(plan.int4_from * plan.steps)

    def at_step(step: int) -> None:
        if step >= begin and not model.layers[-1].mlp.experts.int4_group:  # type: ignore[union-attr]
            train_for_int4(model, plan.int4_group)

    return at_step


def main() -> None:
    plan, options = loop.parse("Trains the trunk.")
    model = prepare(plan)
    if options.weights and not (options.run / PROGRESS).exists():
        fill(model, load_weights(options.weights))
        if options.start:
            fill_mtp(model, load_weights(options.start))
    print(f"{sum(p.numel() for p in model.trunk_parameters()):,} parameters on {loop.device()}", flush=True)
    loop.train(
        model,
        lambda tokens, weights: loss_of(model, tokens, weights, plan.balance, plan.mtp, plan.sharpness),
        plan,
        options.run,
        options.minutes,
        loop.mixture(plan),
        exact=not options.light,
        until=options.until,
        by_clock=options.by_clock,
        at_step=int4_switch(model, plan),
    )


if __name__ == "__main__":
    main()
