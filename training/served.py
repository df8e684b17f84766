"""A checkpoint run by Stoker itself, as evaluation needs it: greedy answers, probabilities of given text, and how much
of the model's own output its drafters would have guessed. Any format Stoker loads will do."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stoker.backends.cpu.backend import CpuBackend
from stoker.backends.family import PAGE_SIZE, Family
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.cache import Cache, KVPages
from stoker.backends.network.dflash import DFlash
from stoker.backends.network.load import load_drafter, load_model
from stoker.engine.engine import Engine, EngineConfig
from stoker.sampling.settings import Sampling

SLOTS = 16  # answers written at a time


@dataclass(frozen=True)
class Acceptance:
    """Sums over steps; rates are taken at the end so that long texts count for more."""

    steps: int = 0
    accepted: int = 0
    drafted: int = 0

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return Acceptance(self.steps + other.steps, self.accepted + other.accepted, self.drafted + other.drafted)

    @property
    def rate(self) -> float:
        return self.accepted / max(1, self.drafted)

    @property
    def emitted_per_step(self) -> float:
        return (self.accepted + self.steps) / max(1, self.steps)


class Served:
    def __init__(self, directory: Path, drafter: Path | None = None, device: str = "cpu") -> None:
        loaded = load_model(directory, device=device)
        self.model, self.config, self.device = loaded.model, loaded.config, device
        self.dtype = self.model.embed_tokens.weight.dtype
        self.drafter: DFlash | None = None
        if drafter is not None:
            self.drafter = load_drafter(drafter, self.config, dtype=self.dtype, device=device)

    def answers(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy, each up to and without its stop token."""
        stops = self.config.eos_token_ids
        each = -(-(max(len(prompt) for prompt in prompts) + max_tokens) // PAGE_SIZE) + 1
        slots = min(SLOTS, len(prompts))
        config = EngineConfig(pages=slots * each, slots=slots, max_depth=0)
        engine = Engine(config, CpuBackend(self.model, config))
        ids = [engine.submit(prompt, Sampling(max_tokens=max_tokens, stop_ids=stops)) for prompt in prompts]
        made: dict[int, list[int]] = {number: [] for number in ids}
        while not engine.idle:
            for event in engine.step():
                made[event.request_id] += event.tokens
        return [[token for token in made[number] if token not in stops] for number in ids]

    @torch.inference_mode()
    def read(self, tokens: list[int], taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """Post-norm hidden states and taps of one sequence."""
        pages = list(range(-(-len(tokens) // PAGE_SIZE)))
        cache = Cache.allocate(self.config, pages=len(pages), slots=1, dtype=self.dtype, device=self.device)
        batch = Batch.of(Family.PREFILL, [Run(tokens, 0, 0, pages)], PAGE_SIZE, self.device)
        return self.model(batch, cache, taps)

    @torch.inference_mode()
    def bits(self, tokens: list[int], start: int, window: int = 2048) -> float:
        """Bits to spell out `tokens`, in windows that each begin afresh after the token `start`."""
        total = 0.0
        for begin in range(0, len(tokens), window):
            piece = tokens[begin : begin + window]
            hidden, _ = self.read([start, *piece[:-1]])
            logits = self.model.logits(hidden, Family.PREFILL)
            total += float(
                torch.nn.functional.cross_entropy(logits, torch.tensor(piece, device=self.device), reduction="sum")
            )
        return total / math.log(2)

    @torch.inference_mode()
    def mtp_acceptance(self, prompt: list[int], output: list[int], depth: int) -> Acceptance:
        """Walks along the output as speculative decoding would, with the output as judge."""
        mtp = self.model.mtp
        if mtp is None:
            raise ValueError("the checkpoint has no MTP head; train and export one first.")
        tokens = prompt + output
        hidden, _ = self.read(tokens)
        table = list(range(-(-(len(tokens) + depth) // PAGE_SIZE)))
        config = self.config
        pages = KVPages.allocate(len(table), config.num_kv_heads, config.head_dim, self.dtype, self.device)

        def feed(following: list[int], below: Tensor, cached: int, family: Family) -> Tensor:
            batch = Batch.of(family, [Run(following, cached, 0, table)], PAGE_SIZE, self.device)
            return mtp(batch, self.model.embed_tokens(batch.token_ids), below, pages)[-1:]

        last, found = len(prompt), Acceptance()  # `last` is the newest committed token; prefill made it
        out = feed(tokens[1 : last + 1], hidden[:last], 0, Family.PREFILL)
        while last + depth + 1 < len(tokens):  # the token after a wholly accepted block is there to go on from
            drafts = [int(self.model.logits(out).argmax())]
            while len(drafts) < depth:
                out = feed(drafts[-1:], out, last + len(drafts) - 1, Family.STEP)
                drafts.append(int(self.model.logits(out).argmax()))
            right = _matching(drafts, tokens[last + 1 :])
            found += Acceptance(1, right, depth)
            onward = last + right + 1
            out = feed(tokens[last + 1 : onward + 1], hidden[last:onward], last, Family.STEP)
            last = onward
        return found

    @torch.inference_mode()
    def dflash_acceptance(self, prompt: list[int], output: list[int], depth: int | None = None) -> Acceptance:
        drafter = self.drafter
        if drafter is None:
            raise ValueError("no drafter was given; name its directory with --drafter.")
        config = drafter.config
        depth = depth or config.block_size - 1
        tokens = prompt + output
        _, features = self.read(tokens, config.taps)
        table = list(range(-(-(len(tokens) + depth + 1) // PAGE_SIZE)))
        pages = [
            KVPages.allocate(len(table), config.num_kv_heads, config.head_dim, self.dtype, self.device)
            for _ in config.layer_types
        ]
        seen, last, found = 0, len(prompt), Acceptance()
        while last + depth < len(tokens):
            family = Family.STEP if seen else Family.PREFILL
            observed = Batch.of(family, [Run(tokens[seen:last], seen, 0, table)], PAGE_SIZE, self.device)
            drafter.observe(observed, features[seen:last], pages)
            block = [tokens[last]] + [config.mask_token_id] * depth
            batch = Batch.of(Family.STEP, [Run(block, last, 0, table)], PAGE_SIZE, self.device)
            out = drafter(batch, self.model.embed_tokens(batch.token_ids), pages)
            drafts = self.model.logits(out[1:]).argmax(-1).tolist()
            right = _matching(drafts, tokens[last + 1 :])
            found += Acceptance(1, right, depth)
            seen, last = last, last + right + 1
        return found


def _matching(drafts: list[int], truth: list[int]) -> int:
    count = 0
    for drafted, true in zip(drafts, truth, strict=False):
        if drafted != true:
            break
        count += 1
    return count
