"""Does the embedded model write the same on a GPU as on a CPU?

    PYTHONPATH=src:. python -m benchmarks.gpu_agreement [--prompts 40] [--tokens 64] [--json FILE]

Both decode greedily, without drafts. Their arithmetic rounds at different places, so where two tokens are nearly
equally likely they may part; from there on texts differ and are no longer compared. Where they part, the CPU's logits
of the two tokens must be closer than bf16 can tell apart.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_result import record
from benchmarks.lossless import Model
from stoker.model.batch import Batch, Run
from stoker.model.cache import PAGE_SIZE, Cache
from stoker.model.decoder import Decoder
from stoker.ops.family import Family

TOLERANCE = 0.25  # of a difference of two logits: 2^-8 of the largest, twice, and as much again for the layers below


@torch.inference_mode()
def margin(model: Decoder, prefix: list[int], first: int, second: int) -> float:
    """How far the logit of `first` lies above that of `second` after the prefix, on the CPU."""
    pages = list(range(-(-len(prefix) // PAGE_SIZE)))
    cache = Cache.allocate(model.config, pages=len(pages), slots=1, dtype=model.embed_tokens.weight.dtype)
    hidden, _ = model(Batch.of(Family.PREFILL, [Run(prefix, 0, 0, pages)], PAGE_SIZE, "cpu"), cache, ())
    logits = model.logits(hidden[-1:], Family.PREFILL)[0].float()
    return float(logits[first] - logits[second])


def compare(prompts: int, tokens: int, device: str) -> dict[str, Any]:
    here, there = Model(), Model(device=device)
    mine = here.alone("bf16", "greedy", 0, prompts, tokens)
    theirs = there.alone("bf16", "greedy", 0, prompts, tokens)
    same, margins = 0, []
    for prompt, one, other in zip(here.prompts, mine, theirs, strict=False):
        agreed = next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        same += agreed
        if agreed < min(len(one), len(other)):
            margins.append(margin(here.model, prompt + one[:agreed], one[agreed], other[agreed]))
    return {
        "prompts": prompts,
        "tokens_each": tokens,
        "prompts_identical": prompts - len(margins),
        "tokens_agreed": same,
        "largest_margin_where_they_part": max(margins, default=0.0),
        "tolerance": TOLERANCE,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here too")
    options = parser.parse_args(arguments)
    found = compare(options.prompts, options.tokens, options.device)
    print(
        f"{found['prompts_identical']} of {found['prompts']} answers are identical, {found['tokens_agreed']:,} tokens "
        f"agree before the first difference; where texts part, the CPU's two logits are at most "
        f"{found['largest_margin_where_they_part']:.3f} apart ({TOLERANCE} allowed)."
    )
    result = record("gpu_agreement", str(options.json) if options.json else None, arguments, **found)
    if found["largest_margin_where_they_part"] > TOLERANCE:
        sys.exit("the GPU chose a token that the CPU finds clearly less likely")
    return result


if __name__ == "__main__":
    main()
