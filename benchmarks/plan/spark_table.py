"""Stoker with Qwen3.5-122B-A10B on one DGX Spark: a prediction from published acceptance, and what it hangs on.

    python -m benchmarks.plan.spark_table --json benchmarks/results/spark_table.json

The box is benchmarks/plan/spark.py, the texts are benchmarks/plan/acceptance.py, and the depth is chosen by the
controller that `--draft auto` runs. Beside each prediction stand what was published for vLLM and what the same
simulation says of vLLM's recipe: the ratio of the two simulated figures is the prediction, and the published figure
shows how far the simulation may be off. Nothing here was measured on a Spark by us.
"""

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.plan import acceptance, replay, spark
from benchmarks.plan.acceptance import ACCEPTED, KINDS, MEASURED_AT, Drafts
from benchmarks.plan.replay import Strategy, Text

TRACES = Path(__file__).parents[1] / "results" / "depth-traces.npz"
TEXTS, TOKENS = 12, 400  # of each kind
PUBLISHED_DEPTH = MEASURED_AT["dflash"]
# vLLM 0.23, hybrid weights, INT8 head, DFlash-12, decode only: README of 2026-06-29; agent turns at 100K from
# docs/FINDINGS.md. Its streams of prose, and those of code, all get one prompt (scripts/conc_workloads.py), so they
# choose the same experts.
SOURCE = "github.com/Entrpi/qwen3.5-122B-A10B-on-spark"


@dataclass(frozen=True)
class Case:
    """Traffic of one kind, and what was published for it."""

    name: str
    kind: str
    context: int
    streams: int
    published: float  # tokens/s of all streams


CASES = (
    Case("prose", "prose", 0, 1, 48.8),
    Case("code", "code", 0, 1, 66.9),
    Case("agent turns behind 100K", "agent", 100_000, 1, 81.0),
    Case("one agent context of 6K", "agent", 6_000, 1, 121.8),
    Case("prose, 3 streams", "prose", 0, 3, 92.5),
    Case("code, 3 streams", "code", 0, 3, 129.0),
    Case("agent context of 6K, 3 streams", "agent", 6_000, 3, 200.0),
)
DRAFT_VOCAB = 32_768
LOSS = 0.01  # share of drafts lost to a trimmed head and an INT4 drafter
RECIPE = spark.HYBRID  # vLLM's: FP8 shared experts, INT8 head for model and drafter, BF16 drafter
CHEAP = replace(spark.HYBRID, mtp=spark.INT4, dflash=spark.INT4, draft_vocab=DRAFT_VOCAB)


@dataclass(frozen=True)
class Way:
    """A way of drafting. `depth` of None is the controller's."""

    name: str
    drafter: str
    depth: int | None
    weights: spark.Weights
    loss: float = 0.0


WAYS = (
    Way("no drafting", "", 0, RECIPE),
    Way("vLLM's recipe: DFlash-12", "dflash", PUBLISHED_DEPTH, RECIPE),
    Way("DFlash, adaptive", "dflash", None, RECIPE),
    Way("DFlash, adaptive, cheap drafts", "dflash", None, CHEAP, LOSS),
    Way("lookup + DFlash, adaptive, cheap drafts", "lookup+dflash", None, CHEAP, LOSS),
    Way("MTP, up to 2, adaptive, cheap drafts", "mtp", None, CHEAP, LOSS),
)
BASE, HEADLINE = WAYS[1], WAYS[3]


@dataclass(frozen=True)
class World:
    """Everything that is assumed."""

    fixed_s: float
    drafts: Drafts
    bandwidth: float = spark.BANDWIDTH
    loss: float = LOSS
    noise: float = replay.NOISE


def believed() -> World:
    fitted = spark.fit()
    return World(fitted.fixed_s, Drafts(acceptance.fit(), ACCEPTED, fitted.pools))


def predict(case: Case, way: Way, world: World, lookup: list[Text], seed: int = 0) -> float:
    """Tokens/s of all streams together."""
    drafts = replace(world.drafts, loss=world.loss if way.loss else 0.0)
    texts = acceptance.make(drafts, case.kind, TEXTS, TOKENS, lookup)
    box = spark.Spark(world.fixed_s, way.weights, case.context, world.bandwidth)
    outcomes = replay.run(texts, Strategy(way.drafter, way.depth, box), seed, case.streams, world.noise)
    return sum(outcome.tokens for outcome in outcomes.values()) / sum(outcome.seconds for outcome in outcomes.values())


def implied(case: Case, world: World, lookup: list[Text]) -> float:
    """Drafts accepted a step at which the simulated recipe is as fast as the published one."""
    low, high = 0.2, PUBLISHED_DEPTH - 0.2
    for _ in range(9):
        middle = (low + high) / 2
        slow = predict(case, BASE, _with(world, case, middle), lookup) < case.published
        low, high = (middle, high) if slow else (low, middle)
    return (low + high) / 2


def _with(world: World, case: Case, accepted: float) -> World:
    """That many DFlash drafts accepted."""
    rates = {name: dict(kinds) for name, kinds in world.drafts.accepted.items()}
    rates["dflash"][case.kind] = accepted
    return replace(world, drafts=replace(world.drafts, accepted=rates))


def variants(world: World) -> Iterator[tuple[str, World]]:
    """One assumption changed at a time."""
    drafts = world.drafts

    def scaled(factor: float) -> World:
        rates = {
            name: {kind: min(MEASURED_AT[name] * 0.99, value * factor) for kind, value in kinds.items()}
            for name, kinds in drafts.accepted.items()
        }
        return replace(world, drafts=replace(drafts, accepted=rates))

    def shaped(shape: acceptance.Shape) -> World:
        return replace(world, drafts=replace(drafts, shape=shape))

    def pooled(factor: float) -> World:
        pools = {kind: min(spark.EXPERTS, max(spark.TOP_K + 1, pool * factor)) for kind, pool in drafts.pools.items()}
        return replace(world, drafts=replace(drafts, pools=pools))

    yield "confidence tells nothing (0.5 instead of 0.89)", shaped(acceptance.fit(0.5))
    yield "confidence tells less (0.75)", shaped(acceptance.fit(0.75))
    yield "confidence tells more (0.95)", shaped(acceptance.fit(0.95))
    yield "hard tokens come in rows (correlation 0.5 instead of 0)", shaped(acceptance.fit(acceptance.TELLS, 0.5))
    yield "a tenth fewer drafts accepted", scaled(0.9)
    yield "a tenth more", scaled(1.1)
    yield "a quarter fewer experts in use", pooled(0.75)
    yield "a quarter more", pooled(1.25)
    yield "2.5 ms of a step are fixed (5.3 fitted to vLLM)", replace(world, fixed_s=2.5e-3)
    yield "8 ms", replace(world, fixed_s=8e-3)
    yield "210 GB/s (227)", replace(world, bandwidth=210 * spark.GB)
    yield "240 GB/s", replace(world, bandwidth=240 * spark.GB)
    yield "cheap drafts lose nothing (1 % of drafts)", replace(world, loss=0.0)
    yield "cheap drafts lose 5 %", replace(world, loss=0.05)
    yield "steps vary by 7 % (3)", replace(world, noise=0.07)


def compare(world: World, lookup: list[Text]) -> list[dict[str, Any]]:
    """Every case in every way: with published acceptance, and with that which the published speed implies."""
    rows = []
    for case in CASES:
        found = implied(case, world, lookup)
        rows.append(
            {
                "case": case.name,
                "context": case.context,
                "streams": case.streams,
                "published_tokens_per_s": case.published,
                "accepted": world.drafts.accepted["dflash"][case.kind],
                "implied_accepted": round(found, 2),
                "predicted": {way.name: round(predict(case, way, world, lookup), 1) for way in WAYS},
                "predicted_at_implied": {
                    way.name: round(predict(case, way, _with(world, case, found), lookup), 1)
                    for way in WAYS
                    if way.drafter != "mtp"
                },
            }
        )
    return rows


def sensitivity(world: World, lookup: list[Text]) -> list[dict[str, Any]]:
    """Of the three cases with one stream and published acceptance: tokens/s, and the ratio to vLLM's recipe."""
    rows = []
    for name, other in [("as assumed", world), *variants(world)]:
        row: dict[str, Any] = {"assumption": name}
        for case in CASES[:3]:
            own, base = predict(case, HEADLINE, other, lookup), predict(case, BASE, other, lookup)
            row[case.name] = {"tokens_per_s": round(own, 1), "ratio": round(own / base, 3)}
        rows.append(row)
    return rows


# -- showing it


def tables(report: dict[str, Any]) -> Iterator[Table]:
    for key, title in (
        ("predicted", "published acceptance"),
        ("predicted_at_implied", "the acceptance at which the simulated recipe is as fast as the published one"),
    ):
        table = Table(title=f"≈ tokens/s of all streams, predicted; {title}")
        names = list(report["cases"][0][key])
        for column in ("", "drafts accepted a step", "vLLM, published", *names):
            table.add_column(column, justify="left" if not column else "right")
        for row in report["cases"]:
            accepted = row["accepted" if key == "predicted" else "implied_accepted"]
            values = [f"{row[key][name]:.1f}" for name in names]
            table.add_row(row["case"], f"{accepted:.2f}", f"{row['published_tokens_per_s']:.1f}", *values)
        yield table
    table = Table(title=f"{HEADLINE.name}: ≈ tokens/s predicted, and times the simulated recipe of vLLM")
    names = [case.name for case in CASES[:3]]
    for column in ("assumption", *names):
        table.add_column(column, justify="left" if column == "assumption" else "right")
    for row in report["sensitivity"]:
        values = [f"{row[name]['tokens_per_s']:.1f} ({row[name]['ratio']:.2f})" for name in names]
        table.add_row(row["assumption"], *values)
    yield table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    world = believed()
    lookup = replay.load(TRACES)
    box = spark.Spark(world.fixed_s, CHEAP)
    drafted = spark.Spark(world.fixed_s, RECIPE)
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.plan.spark_table " + shlex.join(sys.argv[1:]),
        "versions": {"python": platform.python_version(), "numpy": version("numpy")},
        "what": "speeds are predictions for a DGX Spark, made by a simulation; none was measured on one by us",
        "published_by": SOURCE,
        "assumed": {
            "fixed_ms": round(world.fixed_s * 1e3, 2),
            "bandwidth_gb_per_s": world.bandwidth / spark.GB,
            "experts_in_use": {kind: round(world.drafts.pools[kind], 1) for kind in KINDS},
            "accepted": ACCEPTED,
            "spread_of_log_odds": round(world.drafts.shape.spread, 2),
            "confidence_tells": acceptance.TELLS,
            "correlation_of_neighbours": world.drafts.shape.carry,
            "loss_by_cheap_drafts": LOSS,
            "draft_vocab": DRAFT_VOCAB,
            "gb_per_dflash_draft": round(drafted.dflash_bytes / spark.GB, 3),
            "gb_per_cheap_dflash_draft": round(box.dflash_bytes / spark.GB, 3),
        },
        "cases": compare(world, lookup),
        "sensitivity": sensitivity(world, lookup),
    }
    console = Console(width=160)
    for table in tables(report):
        console.print(table)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
