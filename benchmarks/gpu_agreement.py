"""Does the embedded model write the same on a GPU as on a CPU?

    PYTHONPATH=src:. python -m benchmarks.gpu_agreement [--prompts 40] [--tokens 64] [--json FILE]

Both decode greedily, without drafts. Their arithmetic rounds at different places, so where two tokens are nearly
equally likely they may part; from there on texts differ and are no longer compared. How near is nearly? The CPU itself
rounds differently in a prompt than in a step: where those two disagree about the same text is the measure. The GPU's
tokens may lie at most twice as far from the CPU's.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_result import record
from benchmarks.lossless import Model
from stoker.model.batch import Batch, Run
from stoker.model.cache import PAGE_SIZE, Cache
from stoker.model.decoder import Decoder
from stoker.ops.family import Family


@torch.inference_mode()
def logits_of(model: Decoder, prompt: list[int], answer: list[int]) -> Tensor:
    """What the CPU's prompt arithmetic says before each token of the answer: [tokens, vocabulary]."""
    text = prompt + answer
    pages = list(range(-(-len(text) // PAGE_SIZE)))
    cache = Cache.allocate(model.config, pages=len(pages), slots=1, dtype=model.embed_tokens.weight.dtype)
    hidden, _ = model(Batch.of(Family.PREFILL, [Run(text, 0, 0, pages)], PAGE_SIZE, "cpu"), cache, ())
    return model.logits(hidden[len(prompt) - 1 : -1], Family.PREFILL).float()


def parted(one: list[int], other: list[int]) -> int | None:
    """Where two texts part."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


def compare(prompts: int, tokens: int, device: str) -> dict[str, Any]:
    here, there = Model(), Model(device=device)
    mine = here.alone("bf16", "greedy", 0, prompts, tokens)
    theirs = there.alone("bf16", "greedy", 0, prompts, tokens)
    agreed, own, margins = 0, 0.0, []
    for prompt, one, other in zip(here.prompts, mine, theirs, strict=False):
        logits = logits_of(here.model, prompt, one)
        chosen = logits.gather(1, torch.tensor(one)[:, None])[:, 0]
        own = max(own, float((logits.max(1).values - chosen).max()))
        at = parted(one, other)
        agreed += len(one) if at is None else at
        if at is not None:
            margins.append(float(logits[at].max() - logits[at, other[at]]))
    return {
        "prompts": prompts,
        "tokens_each": tokens,
        "prompts_identical": prompts - len(margins),
        "tokens_agreed": agreed,
        "largest_margin_where_they_part": max(margins, default=0.0),
        "largest_margin_of_the_cpu_itself": own,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here too")
    options = parser.parse_args(arguments)
    found = compare(options.prompts, options.tokens, options.device)
    margin, own = found["largest_margin_where_they_part"], found["largest_margin_of_the_cpu_itself"]
    print(
        f"{found['prompts_identical']} of {found['prompts']} answers are identical, {found['tokens_agreed']:,} tokens "
        f"agree before the first difference; where texts part, the GPU's token is at most {margin:.3f} below the CPU's "
        f"best. The CPU's own step and prompt differ by up to {own:.3f}."
    )
    result = record("gpu_agreement", str(options.json) if options.json else None, arguments, **found)
    if margin > 2 * own:
        sys.exit("the GPU chose a token that the CPU finds clearly less likely")
    return result


if __name__ == "__main__":
    main()
