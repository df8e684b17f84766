"""Replays recorded drafting on the clock of a simulated Spark, with a fixed depth or with the depth controller.

Routing of a small model with few experts is carried over by overlap: if n tokens touch as many of its experts as m
tokens with independent routing would, they are taken to touch as many of the 256 as m independent tokens would.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plan import spark
from benchmarks.plan.spark import Spark
from benchmarks.plan.traces import DEPTHS, from_levels
from stoker.speculate.depth.controller import DepthController
from stoker.speculate.depth.cost import PER_TOKEN, DraftCost, StepBytes
from stoker.speculate.drafter import Draft, trusted

POSTPONE = 64  # tokens a drafter may fall behind while it is not asked, as in the engine
NOISE = 0.03  # standard deviation of a step's time, relative; boxes are reported to vary by 6 to 7 % between runs
WRONG = -1  # a draft that is not what the text says; positions stand for the tokens of the text


@dataclass(frozen=True)
class Block:
    """What one drafter proposed at one position."""

    sure: list[float]
    right: int  # leading drafts that came true
    distinct: list[float]  # experts of 256 that the newest token and 0, 1, ... drafts touch

    def draft(self, position: int, source: str, depth: int) -> Draft:
        tokens = [position + 1 + k if k < self.right else WRONG for k in range(min(depth, len(self.sure)))]
        return Draft(tokens, self.sure[: len(tokens)], source if tokens else "")


@dataclass(frozen=True)
class Text:
    kind: str
    blocks: dict[str, list[Block]]  # by drafter, one per position

    def __len__(self) -> int:
        return len(next(iter(self.blocks.values())))


def load(path: Path) -> list[Text]:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    experts, top_k = (int(n) for n in arrays["experts"])
    kinds = list(dict.fromkeys(name.split("/")[0] for name in arrays if "/" in name))
    texts = []
    for kind in kinds:
        names = [name for name in DEPTHS if f"{kind}/{name}/made" in arrays]
        first = 0
        for length in arrays[f"{kind}/lengths"].tolist():
            rows = slice(first, first + length)
            first += length
            texts.append(Text(kind, {name: _blocks(arrays, f"{kind}/{name}", rows, experts, top_k) for name in names}))
    return texts


def _blocks(arrays: dict[str, np.ndarray], stem: str, rows: slice, experts: int, top_k: int) -> list[Block]:
    made, right = arrays[f"{stem}/made"][rows].tolist(), arrays[f"{stem}/right"][rows].tolist()
    sure = from_levels(arrays[f"{stem}/sure"][rows].astype(float))
    counts = arrays[f"{stem}/distinct"][rows].astype(float) / 255 * experts
    distinct = as_on_spark(counts, experts, top_k)
    return [Block(sure[i, : made[i]].tolist(), right[i], distinct[i, : made[i] + 1].tolist()) for i in range(len(made))]


def as_on_spark(counts: np.ndarray, experts: int, top_k: int) -> np.ndarray:
    """Distinct experts [N, 1 + K] of a small model -> of 256 with 8 per token, by overlap."""
    if not experts:
        return np.full(counts.shape, float(spark.TOP_K))
    left = np.clip(1 - counts / experts, 0.25 / experts, 1 - top_k / experts)
    independent = np.log(left) / np.log(1 - top_k / experts)
    tokens = np.arange(1, counts.shape[1] + 1)
    return spark.EXPERTS * (1 - (1 - spark.TOP_K / spark.EXPERTS) ** np.clip(independent, 1, tokens))


# -- one way of drafting


class Strategy:
    """Depth per step. `drafter` is "" (none), a name, or "lookup+name"."""

    def __init__(self, drafter: str, depth: int | None, box: Spark) -> None:
        self.drafter, self.depth, self.box = drafter, depth, box
        self.free = drafter.startswith("lookup")
        self.paid = drafter.removeprefix("lookup").removeprefix("+")
        self.controller = controller_for(box, self.paid) if depth is None else None


def controller_for(box: Spark, paid: str, budget: int = 128) -> DepthController:
    """As an engine on the box would make it: from bytes, not from the simulation's constants."""
    costs = {"mtp": DraftCost(token=box.mtp_pass_bytes), "dflash": DraftCost(block=box.dflash_bytes)}
    shape = StepBytes(
        fixed=box.fixed_bytes,
        expert=box.expert_bytes,
        token=PER_TOKEN * box.fixed_bytes,
        experts=spark.EXPERTS,
        top_k=spark.TOP_K,
    )
    return DepthController(shape, {paid: costs[paid]} if paid else {}, budget)


@dataclass
class Outcome:
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    drafted: int = 0
    verified: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def add(self, other: "Outcome") -> None:
        self.tokens += other.tokens
        self.steps += other.steps
        self.seconds += other.seconds
        self.drafted += other.drafted
        self.verified += other.verified

    def report(self) -> dict[str, Any]:
        return {
            "tokens_per_s": round(self.tokens_per_s, 2),
            "tokens_per_step": round(self.tokens / max(1, self.steps), 3),
            "mean_depth": round(self.verified / max(1, self.steps), 2),
        }


@dataclass
class _Stream:
    """A request on its way."""

    key: int
    text: Text
    position: int = 0
    behind: int = 1  # committed tokens its drafter has not computed

    @property
    def room(self) -> int:
        """Drafts that could still be used: the last token of a text comes without."""
        return len(self.text) - self.position - 1


def run(
    texts: Sequence[Text], strategy: Strategy, seed: int = 0, together: int = 1, noise: float = NOISE
) -> dict[str, Outcome]:
    """All texts as one engine would serve them, `together` at a time. -> by kind; the time of a step is shared out."""
    rng = random.Random(seed)
    outcomes = {text.kind: Outcome() for text in texts}
    waiting = [_Stream(key, text) for key, text in enumerate(texts)]
    running: list[_Stream] = []
    while waiting or running:
        running += [waiting.pop(0) for _ in range(min(together - len(running), len(waiting)))]
        for stream, step in zip(
            running, _step(running, strategy, lambda: max(0.5, rng.gauss(1.0, noise))), strict=True
        ):
            outcomes[stream.text.kind].add(step)
            stream.position += step.tokens
            stream.behind += step.tokens
            if strategy.controller and stream.position >= len(stream.text):
                strategy.controller.forget(stream.key)
        running = [stream for stream in running if stream.position < len(stream.text)]
    return outcomes


def _step(running: Sequence[_Stream], strategy: Strategy, noise: Callable[[], float]) -> list[Outcome]:
    controller, box = strategy.controller, strategy.box
    paid = [bool(strategy.depth) and stream.room > 0 for stream in running]
    if controller:
        paid = controller.ask([stream.key for stream in running], [stream.room for stream in running])
    rivals = controller.rivals() if controller else [0.0] * len(running)
    made = [_draft(stream, strategy, own, rival) for stream, own, rival in zip(running, paid, rivals, strict=True)]
    if controller and strategy.paid == "mtp":
        made = _pass_by_pass(made, controller)
    drafts = [draft for draft, _ in made]
    depths = controller.cut(drafts) if controller else [min(len(draft), strategy.depth or 0) for draft in drafts]
    passes = max((len(draft) for draft in drafts if draft.source == strategy.paid), default=0)
    draft_s = box.draft_s(strategy.paid, passes)
    if strategy.paid:
        for stream, draft in zip(running, drafts, strict=True):
            draft_s += _catch_up_s(strategy, stream.behind, draft.source == strategy.paid)
            if draft.source == strategy.paid or stream.behind >= POSTPONE:
                stream.behind = 0
    left = 1.0  # share of the experts that no request touches: requests choose independently of each other
    for (_, block), depth in zip(made, depths, strict=True):
        left *= 1 - block.distinct[depth] / spark.EXPERTS
    distinct = spark.EXPERTS * (1 - left)
    verify_s = box.verify_s(distinct, len(running)) * noise()
    emitted = [min(depth, block.right) + 1 for (_, block), depth in zip(made, depths, strict=True)]
    if controller:
        tokens = [range(s.position + 1, s.position + 1 + n) for s, n in zip(running, emitted, strict=True)]
        controller.observe(tokens, verify_s, draft_s, distinct)
    share = (verify_s + draft_s) / len(running)
    return [Outcome(n, 1, share, len(draft), depth) for n, draft, depth in zip(emitted, drafts, depths, strict=True)]


def _draft(stream: _Stream, strategy: Strategy, paid: bool, rival: float) -> tuple[Draft, Block]:
    """What the engine's drafters would hand over: lookup first, where it is trusted; else the network's."""
    text, position = stream.text, stream.position
    most = min(stream.room, strategy.depth if strategy.depth is not None else stream.room)
    found, block = Draft(), next(iter(text.blocks.values()))[position]
    if strategy.free and most:
        block = text.blocks["lookup"][position]
        found = block.draft(position, "lookup", most)
        if trusted(found, rival):
            return found, block
    if not paid or not strategy.paid or not most:
        return found, block
    own = text.blocks[strategy.paid][position]
    return own.draft(position, strategy.paid, most), own


def _pass_by_pass(made: list[tuple[Draft, Block]], controller: DepthController) -> list[tuple[Draft, Block]]:
    """MTP stops where the controller says so."""
    own = [draft.source == "mtp" for draft, _ in made]
    lengths = [min(1, len(draft)) if mtp else 0 for (draft, _), mtp in zip(made, own, strict=True)]
    live = own
    while any(live):
        more = controller.more([draft.first(n) if n else Draft() for (draft, _), n in zip(made, lengths, strict=True)])
        live = [
            was and wanted and n < len(draft)
            for was, wanted, n, (draft, _) in zip(live, more, lengths, made, strict=True)
        ]
        lengths = [n + 1 if on else n for n, on in zip(lengths, live, strict=True)]
    return [
        (draft.first(n) if mtp else draft, block) for (draft, block), n, mtp in zip(made, lengths, own, strict=True)
    ]


def _catch_up_s(strategy: Strategy, behind: int, drafting: bool) -> float:
    """Showing the drafter what was committed since it last ran, beyond the one layer a draft reads anyway."""
    box, pool = strategy.box, spark.EXPERTS / 2
    if strategy.controller and not drafting and behind < POSTPONE:
        return 0.0
    if strategy.paid == "dflash":
        return 0.0 if drafting else spark.DFLASH_OBSERVE * box.weights.dflash / box.bandwidth
    experts = spark.distinct(behind, pool) - (spark.TOP_K if drafting else 0)
    dense = 0 if drafting else spark.MTP_DENSE
    return (dense + max(0.0, experts) * spark.EXPERT) * box.weights.mtp / box.bandwidth
