"""Does the embedded model write the same on a GPU as on a CPU?

    PYTHONPATH=src:. python -m benchmarks.gpu.agreement [--prompts 40] [--tokens 64] [--json FILE]

Both decode greedily, without drafts, in bf16. Their arithmetic rounds at different places, so where two tokens are
nearly equally likely they may part. What counts is how far each is from the same weights computed in fp32: the root
mean square, over all tokens written and the TOP likeliest at each place, of the difference of log-probabilities. The
GPU's may be at most LIMIT times the CPU's.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.result import record
from benchmarks.lossless import Model, sampling_of
from stoker.backends.family import PAGE_SIZE, Family
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.cache import Cache
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.load import load_model
from stoker.demo import EMBEDDED
from stoker.engine.request import TokenLogprob

TOP = 20
LIMIT = 1.1  # as for prompts against transformers


@torch.inference_mode()
def truth(model: Decoder, prompt: list[int], answer: list[int]) -> Tensor:
    """Log-probabilities before each token of the answer: [tokens, vocabulary]."""
    text = prompt + answer
    pages = list(range(-(-len(text) // PAGE_SIZE)))
    cache = Cache.allocate(model.config, pages=len(pages), slots=1, dtype=model.embed_tokens.weight.dtype)
    hidden, _ = model(Batch.of(Family.PREFILL, [Run(text, 0, 0, pages)], PAGE_SIZE, "cpu"), cache, ())
    return model.logits(hidden[len(prompt) - 1 : -1], Family.PREFILL).double().log_softmax(1)


def answers(model: Model, count: int, tokens: int) -> list[list[TokenLogprob]]:
    found: list[list[TokenLogprob]] = []
    engine = model.engine_for(max(map(len, model.prompts[:count])) + tokens)
    for index in range(count):
        engine.submit(model.prompts[index], replace(sampling_of("greedy", index, tokens), logprobs=TOP), 0)
        found.append([])
        while not engine.idle:
            for event in engine.step():
                if event.error:
                    raise RuntimeError(event.error)
                found[-1] += event.logprobs
    return found


def distance(exact: Decoder, prompts: list[list[int]], found: list[list[TokenLogprob]]) -> float:
    """Root mean square, over all places and their likeliest tokens."""
    squares = []
    for prompt, answer in zip(prompts, found, strict=False):
        expected = truth(exact, prompt, [each.token for each in answer])
        for row, each in zip(expected, answer, strict=True):
            ids, values = zip(*each.top, strict=True)
            squares.append((torch.tensor(values, dtype=torch.float64) - row[list(ids)]).square())
    return float(torch.cat(squares).mean().sqrt())


def parted(one: list[TokenLogprob], other: list[TokenLogprob]) -> int:
    """How many tokens two answers begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a.token != b.token), min(len(one), len(other)))


def compare(prompts: int, tokens: int, device: str) -> dict[str, Any]:
    here, there = Model(), Model(device=device)
    mine, theirs = answers(here, prompts, tokens), answers(there, prompts, tokens)
    alike = [parted(one, other) for one, other in zip(mine, theirs, strict=True)]
    exact = load_model(EMBEDDED, dtype=torch.float32).model
    return {
        "prompts": prompts,
        "tokens_each": tokens,
        "prompts_identical": sum(count == len(one) for count, one in zip(alike, mine, strict=True)),
        "tokens_agreed": sum(alike),
        "distance_from_fp32": distance(exact, here.prompts, theirs),
        "distance_of_the_cpu": distance(exact, here.prompts, mine),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here too")
    options = parser.parse_args(arguments)
    found = compare(options.prompts, options.tokens, options.device)
    far, own = found["distance_from_fp32"], found["distance_of_the_cpu"]
    print(
        f"{found['prompts_identical']} of {found['prompts']} answers are identical, {found['tokens_agreed']:,} tokens "
        f"agree before the first difference. Log-probabilities of the {TOP} likeliest tokens are {far:.4f} from fp32, "
        f"the CPU's {own:.4f}: {far / own:.2f} of it, {LIMIT} allowed."
    )
    result = record("gpu/agreement", str(options.json) if options.json else None, arguments, **found)
    if not far <= LIMIT * own:
        sys.exit("the GPU is further from fp32 than bf16 on the CPU is")
    return result


if __name__ == "__main__":
    main()
