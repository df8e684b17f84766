"""Does a running vLLM write what Stoker writes, greedily, from the same files?

    PYTHONPATH=src:. python -m benchmarks.peers.same_text URL CHECKPOINT [--prompts 50] [--tokens 16] [--json FILE]

Both get the same token ids of the embedded model's prompts, whose tokenizer CHECKPOINT must have, and write until the
model ends or --tokens are reached. Stoker computes on this machine's CPU, without drafts. Both compute in bf16 and
round at different places, so where two tokens are nearly equally likely they may part.

What is true is what the same weights give in fp32. Each engine tells the log-probabilities of its TOP likeliest tokens
at every place; how far these are from fp32 is its rounding. A difference is explained if the two tokens are no further
apart in fp32 than rounding moved the two likeliest tokens at some place where the engines still agreed. Everything else
is a difference without an explanation, and the exit status is 1.
"""

import argparse
import datetime
import json
import platform
import sys
import urllib.request
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.agreement import truth
from benchmarks.lossless import Model, sampling_of
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.load import load_model

TOP = 20  # vLLM tells no more
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Token:
    id: int
    top: dict[int, float]  # log-probabilities of the likeliest ones


@dataclass(frozen=True)
class Parting:
    """Where two answers differ first."""

    prompt: int
    place: int  # tokens that were the same
    stoker: int  # token ids
    vllm: int
    ranks: tuple[int, int]  # of the two tokens in fp32; 1 is the likeliest
    gap: float  # between their log-probabilities in fp32
    gap_stoker: float | None  # Stoker's token above vLLM's, as either engine has it; None: not among its likeliest
    gap_vllm: float | None

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt}, after {self.place} equal tokens: Stoker {self.stoker}, vLLM {self.vllm}; "
            f"{self.gap:+.4f} in fp32 (likeliest number {self.ranks[0]} and {self.ranks[1]}), "
            f"{_shown(self.gap_stoker)} in Stoker, {_shown(self.gap_vllm)} in vLLM"
        )


def _shown(gap: float | None) -> str:
    return "unknown" if gap is None else f"{gap:+.4f}"


class Rounding:
    """How far an engine's log-probabilities are from those of fp32."""

    def __init__(self) -> None:
        self.squares: list[float] = []
        self.turned: list[float] = []  # errors of the difference between fp32's two likeliest tokens

    def add(self, token: Token, exact: Tensor) -> None:
        self.squares += [(value - float(exact[id])) ** 2 for id, value in token.top.items()]
        one, other = exact.topk(2).indices.tolist()
        gap = _gap(token, one, other)
        if gap is not None:
            self.turned.append(abs(gap - float(exact[one] - exact[other])))

    @property
    def distance(self) -> float:
        """Root mean square."""
        return (sum(self.squares) / max(1, len(self.squares))) ** 0.5


def _gap(token: Token, one: int, other: int) -> float | None:
    return token.top[one] - token.top[other] if one in token.top and other in token.top else None


def of_vllm(url: str, name: str, prompt: list[int], tokens: int) -> list[Token]:
    body = {
        "model": name,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "logprobs": TOP,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # as "token_id:123"
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        (choice,) = json.load(answer)["choices"]
    tops = [
        {int(key.partition(":")[2]): value for key, value in top.items()} for top in choice["logprobs"]["top_logprobs"]
    ]
    return [Token(id, top) for id, top in zip(choice["token_ids"], tops, strict=True)]


def of_stoker(model: Model, index: int, tokens: int) -> list[Token]:
    prompt = model.prompts[index]
    engine = model.engine_for(len(prompt) + tokens)
    sampling = replace(sampling_of("greedy", index, tokens), stop_ids=model.model.config.eos_token_ids, logprobs=TOP)
    engine.submit(prompt, sampling, 0)
    found: list[Token] = []
    while not engine.idle:
        for event in engine.step():
            if event.error:
                raise RuntimeError(event.error)
            found += [Token(each.token, dict(each.top)) for each in event.logprobs]
    return found


def parting(index: int, mine: list[Token], theirs: list[Token], exact: Tensor) -> Parting | None:
    """None: the answers are the same. `exact`: log-probabilities in fp32 before each of `mine`."""
    pairs = enumerate(zip(mine, theirs, strict=False))
    place = next((i for i, (a, b) in pairs if a.id != b.id), None)
    if place is None:  # an engine may or may not show the token that ends an answer
        return None
    (one, other), row = (each[place] for each in (mine, theirs)), exact[place]
    return Parting(
        prompt=index,
        place=place,
        stoker=one.id,
        vllm=other.id,
        ranks=(1 + int((row > row[one.id]).sum()), 1 + int((row > row[other.id]).sum())),
        gap=float(row[one.id] - row[other.id]),
        gap_stoker=_gap(one, one.id, other.id),
        gap_vllm=_gap(other, one.id, other.id),
    )


@dataclass(frozen=True)
class Compared:
    partings: list[Parting]
    alike: int  # tokens before the first differences
    stoker: Rounding
    vllm: Rounding

    @property
    def allowed(self) -> float:
        """The most that rounding moved two tokens where the engines agreed."""
        return max(self.stoker.turned + self.vllm.turned, default=0.0)

    def moved_more(self, parting: Parting) -> float:
        """The share of places where the engines agreed and rounding moved two tokens by more than this gap."""
        moved = self.stoker.turned + self.vllm.turned
        return sum(each > abs(parting.gap) for each in moved) / max(1, len(moved))

    @property
    def unexplained(self) -> list[Parting]:
        return [each for each in self.partings if abs(each.gap) > self.allowed]


def compare(url: str, name: str, directory: Path, prompts: int, tokens: int) -> Compared:
    model, exact = Model(directory), load_model(directory, dtype=torch.float32).model
    found = Compared([], 0, Rounding(), Rounding())
    alike = 0
    for index in range(prompts):
        parted, same = compare_one(found, model, exact, url, name, index, tokens)
        alike += same
        if parted:
            print(parted, flush=True)
            found.partings.append(parted)
    return replace(found, alike=alike)


def compare_one(
    found: Compared, model: Model, exact: Decoder, url: str, name: str, index: int, tokens: int
) -> tuple[Parting | None, int]:
    prompt = model.prompts[index]
    mine, theirs = of_stoker(model, index, tokens), of_vllm(url, name, prompt, tokens)
    rows = truth(exact, prompt, [each.id for each in mine])
    parted = parting(index, mine, theirs, rows)
    same = parted.place if parted else min(len(mine), len(theirs))
    for place in range(same):
        found.stoker.add(mine[place], rows[place])
        found.vllm.add(theirs[place], rows[place])
    return parted, same


def ask(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}{path}", timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here too")
    options = parser.parse_args(arguments)
    name = ask(options.url, "/v1/models")["data"][0]["id"]
    found = compare(options.url, name, options.checkpoint, options.prompts, options.tokens)
    same = options.prompts - len(found.partings)
    result = {
        "command": f"python -m benchmarks.peers.same_text URL DEMO-BF16 --prompts {options.prompts} "
        f"--tokens {options.tokens}",
        "date": datetime.date.today().isoformat(),
        "versions": {
            "vllm": ask(options.url, "/version")["version"],
            "torch of Stoker": torch.__version__,
            "python": platform.python_version(),
        },
        "prompts": options.prompts,
        "tokens_each": options.tokens,
        "prompts_identical": same,
        "tokens_agreed": found.alike,
        "distance_from_fp32": {"stoker": found.stoker.distance, "vllm": found.vllm.distance},
        "moved_median": {"stoker": median(found.stoker.turned), "vllm": median(found.vllm.turned)},
        "moved_at_most": {"stoker": max(found.stoker.turned), "vllm": max(found.vllm.turned)},
        "differences": [{**asdict(each), "moved_more": found.moved_more(each)} for each in found.partings],
        "not_explained": len(found.unexplained),
    }
    print(
        f"{same} of {options.prompts} answers of up to {options.tokens} tokens are identical, {found.alike:,} tokens "
        f"agree. Log-probabilities of the {TOP} likeliest tokens are {found.stoker.distance:.4f} from fp32 in Stoker "
        f"and {found.vllm.distance:.4f} in vLLM; where both agree, rounding moved the two likeliest tokens by up to "
        f"{max(found.stoker.turned):.4f} and {max(found.vllm.turned):.4f}. {len(found.unexplained)} differences are "
        "larger than that."
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if found.unexplained:
        sys.exit("some differences are not explained by rounding")
    return result


if __name__ == "__main__":
    main()
