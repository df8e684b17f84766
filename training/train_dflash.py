"""Trains the DFlash drafter on a frozen trunk.

    python -m training.train_dflash --weights TRUNK --run build/training/dflash

Every row of text gets random anchors; the block after each is drafted in one pass and compared with what the trunk
itself says at those places. With --start DIR it goes on from the drafter of another run or checkpoint.
"""

import torch
from torch import Tensor

from training import loop
from training.config import SHAPES
from training.dflash import Drafter, block_weights
from training.imitation import imitation
from training.model import Model
from training.quantize import train_for_int4
from training.state import fill, load_weights
from training.train_trunk import prepare

BLOCKS = 32  # anchors per row


def anchors_of(weights: Tensor, blocks: int, size: int, generator: torch.Generator) -> Tensor:
    """Random places [B, blocks] with a whole block after them, mostly where the assistant writes."""
    usable = weights[:, : weights.shape[1] - size]
    return torch.multinomial(usable, blocks, replacement=False, generator=generator) + 1


def loss_of(
    drafter: Drafter, model: Model, tokens: Tensor, weights: Tensor, generator: torch.Generator, blocks: int = BLOCKS
) -> dict[str, Tensor]:
    config = drafter.config
    size = config.block_size
    inputs = tokens[:, :-1]
    with torch.no_grad():
        out = model(inputs, taps=config.taps)
        wanted = model.lm_head(out.hidden)
    anchors = anchors_of(weights, blocks, size, generator)
    block = inputs.gather(1, anchors)[..., None].repeat(1, 1, size)
    block[..., 1:] = config.mask_token_id
    drafted = drafter(out.features, model.embed_tokens(block), anchors)  # row j guesses token anchor + j
    places = anchors[..., None] + torch.arange(size, device=tokens.device) - 1  # where the trunk guesses the same token
    batch = torch.arange(len(tokens), device=tokens.device)[:, None, None]
    target = wanted[batch, places]
    importance = block_weights(size, tokens.device) * weights[batch, places]
    logits = model.lm_head(drafted)
    loss = imitation(logits.flatten(1, 2), target.flatten(1, 2), importance.flatten(1, 2))
    right = (logits.argmax(-1) == target.argmax(-1))[..., 1:].float()
    return {"loss": loss, "first": right[..., 0].mean(), "accepted": right.cumprod(-1).sum(-1).mean()}


def main() -> None:
    plan, options = loop.parse("Trains the DFlash drafter.", steps=6000, lr=1.5e-3, warmup=100, decay=0.5, batch=32)
    if not options.weights:
        raise SystemExit("--weights is missing: give the run directory of the trained trunk.")
    model = prepare(plan)
    fill(model, load_weights(options.weights))
    model.requires_grad_(False)
    where = loop.device()
    torch.manual_seed(plan.seed)
    drafter = Drafter(SHAPES[plan.shape].dflash).to(where)
    if options.start:
        fill(drafter, load_weights(options.start))
    if plan.int4_from < 1.0:
        train_for_int4(model, plan.int4_group)
        train_for_int4(drafter, plan.int4_group)
    generator = torch.Generator(where)

    def reseed(step: int) -> None:
        generator.manual_seed(plan.seed * 1_000_003 + step)

    loop.train(
        drafter,
        lambda tokens, weights: loss_of(drafter, model, tokens, weights, generator),
        plan,
        options.run,
        options.minutes,
        loop.mixture(plan, own=True),
        exact=not options.light,
        until=options.until,
        by_clock=options.by_clock,
        at_step=reseed,
    )


if __name__ == "__main__":
    main()
