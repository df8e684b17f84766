"""Does a running vLLM write what Stoker writes, greedily, from the same files?

    PYTHONPATH=src:. python -m benchmarks.peers.same_text URL CHECKPOINT [--prompts 50] [--tokens 64] [--json FILE]

Both get the same token ids of the embedded model's prompts, whose tokenizer CHECKPOINT must have, and write until the
model ends or --tokens are reached. Stoker computes on this machine's CPU, without drafts. Both compute in bf16 and round
at different places, so where two tokens are nearly equally likely they may part. Such a place is explained if the same
weights computed in fp32 have these two tokens as their likeliest ones, no further apart than STEPS steps of bf16 at the
size of these logits: that is what rounding the logits alone can turn around. Everything else is a difference without
an explanation, and the exit status is 1.
"""

import argparse
import datetime
import json
import math
import platform
import sys
import urllib.request
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.agreement import truth_of_logits
from benchmarks.lossless import Model, sampling_of
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.load import load_model

STEPS = 2.0  # of bf16: each of the two logits may be half a step off in either engine
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Parting:
    """Where two answers differ first."""

    prompt: int
    place: int  # tokens that were the same
    stoker: int  # token ids; -1: the answer ended
    vllm: int
    ranks: tuple[int, int]  # of the two tokens in fp32; 0 is the likeliest
    gap: float  # of their fp32 logits
    step: float  # of bf16 at the larger of them
    explained: bool

    def __str__(self) -> str:
        said = "explained" if self.explained else "NOT EXPLAINED"
        return (
            f"prompt {self.prompt}, after {self.place} equal tokens: Stoker {self.stoker}, vLLM {self.vllm}; in fp32 "
            f"number {self.ranks[0] + 1} and {self.ranks[1] + 1}, {self.gap:.4f} apart, {self.gap / self.step:.2f} steps "
            f"of bf16 ({self.step:g}): {said}"
        )


def of_vllm(url: str, name: str, prompt: list[int], tokens: int) -> list[int]:
    body = {"model": name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        (choice,) = json.load(answer)["choices"]
    found: list[int] = choice["token_ids"]
    return found


def of_stoker(model: Model, index: int, tokens: int) -> list[int]:
    prompt = model.prompts[index]
    engine = model.engine_for(len(prompt) + tokens)
    ends = model.model.config.eos_token_ids
    engine.submit(prompt, replace(sampling_of("greedy", index, tokens), stop_ids=ends), 0)
    found: list[int] = []
    while not engine.idle:
        for event in engine.step():
            if event.error:
                raise RuntimeError(event.error)
            found += event.tokens
    return found


def parting(exact: Decoder, index: int, prompt: list[int], mine: list[int], theirs: list[int]) -> Parting | None:
    """None: the answers are the same."""
    ends = exact.config.eos_token_ids
    mine, theirs = _shown(mine, ends), _shown(theirs, ends)
    if mine == theirs:
        return None
    pairs = enumerate(zip(mine, theirs, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
    one, other = (each[place] if place < len(each) else -1 for each in (mine, theirs))
    logits = truth_of_logits(exact, prompt, [*mine[:place], 0])[-1]
    chosen = [ends[0] if token < 0 else token for token in (one, other)]
    values = [float(logits[token]) for token in chosen]
    ranks = tuple(int((logits > value).sum()) for value in values)
    step = 2.0 ** (math.floor(math.log2(max(map(abs, values)))) - 7)  # bf16 keeps 8 bits
    gap = abs(values[0] - values[1])
    explained = sorted(ranks) == [0, 1] and gap <= STEPS * step
    return Parting(index, place, one, other, (ranks[0], ranks[1]), gap, step, explained)


def _shown(tokens: list[int], ends: tuple[int, ...]) -> list[int]:
    """Without the token that ends an answer, which not every engine shows."""
    return tokens[:-1] if tokens and tokens[-1] in ends else tokens


def compare(url: str, name: str, directory: Path, prompts: int, tokens: int) -> tuple[int, list[Parting]]:
    """How many tokens are the same before the first difference, and where answers part."""
    model, exact = Model(directory), load_model(directory, dtype=torch.float32).model
    alike, found = 0, []
    for index, prompt in enumerate(model.prompts[:prompts]):
        mine, theirs = of_stoker(model, index, tokens), of_vllm(url, name, prompt, tokens)
        parted = parting(exact, index, prompt, mine, theirs)
        alike += parted.place if parted else len(mine)
        if parted:
            print(parted, flush=True)
            found.append(parted)
    return alike, found


def ask(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}{path}", timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here too")
    options = parser.parse_args(arguments)
    name = ask(options.url, "/v1/models")["data"][0]["id"]
    alike, found = compare(options.url, name, options.checkpoint, options.prompts, options.tokens)
    result = {
        "date": datetime.date.today().isoformat(),
        "versions": {
            "vllm": ask(options.url, "/version")["version"],
            "torch of Stoker": torch.__version__,
            "python": platform.python_version(),
        },
        "prompts": options.prompts,
        "tokens_each": options.tokens,
        "prompts_identical": options.prompts - len(found),
        "tokens_agreed": alike,
        "differences": [asdict(each) for each in found],
        "not_explained": sum(not each.explained for each in found),
    }
    print(f"{result['prompts_identical']} of {options.prompts} answers are identical, {alike:,} tokens agree.")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if result["not_explained"]:
        sys.exit("some differences are not explained by rounding")
    return result


if __name__ == "__main__":
    main()
