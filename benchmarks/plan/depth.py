"""Is a depth chosen anew each step better than any fixed one? Recorded traces on the clock of a simulated DGX Spark.

    python -m benchmarks.plan.traces --model build/demo-checkpoint --out benchmarks/results/depth-traces.npz
    python -m benchmarks.plan.depth --json benchmarks/results/depth.json --charts benchmarks/results

First the simulated box is held against published rows (spark.py); then drafting recorded from a real model (traces.py)
is replayed on its clock at every fixed depth and with the depth controller, one controller for all texts in turn.
Acceptance, confidence and overlap of routing are the small model's, bytes and times the big one's.
With --cpu MODEL the same comparison runs on this machine by the wall clock, with its noise.
"""

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root is where `benchmarks` lies
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.plan import chart, replay, spark
from benchmarks.plan.replay import Outcome, Strategy, Text
from benchmarks.plan.traces import DEPTHS

TRACES = Path(__file__).parents[1] / "results" / "depth-traces.npz"
DRAFTERS = ("mtp", "dflash", "lookup+mtp", "lookup+dflash")
FIXED = {"mtp": (1, 2, 3, 4, 5, 6, 8), "dflash": (1, 2, 3, 4, 6, 8, 10, 12, 15)}
TOGETHER = (2, 4, 8)  # requests at a time, beside the comparison one by one
INCOMPRESSIBLE = "random"
WITHIN = 0.10  # of published rows
NEAR = 0.98  # of the best fixed depth, or of no drafting
WEIGHTS = replace(spark.HYBRID, mtp=spark.INT4, dflash=spark.INT4)  # the recipe the replay runs


# -- the simulated box


def published(fitted: spark.Fitted) -> list[dict[str, Any]]:
    rows = []
    for row in spark.PUBLISHED:
        predicted = fitted.predict(row)
        rows.append(
            {
                "published_tokens_per_s": row.tokens_per_s,
                "predicted_tokens_per_s": round(predicted, 2),
                "error": round(predicted / row.tokens_per_s - 1, 4),
                "draft": f"{row.drafter}:{row.depth}" if row.drafter else "none",
                "tokens_per_step": row.accepted,
                "text": row.text,
                "context": row.context,
                "scope": row.scope,
                "role": f"fits {row.fits}" if row.fits else "check",
                "required": row.required,
            }
        )
    return rows


# -- the replay


def speeds(outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """Per kind of text and over all of them."""
    whole = Outcome()
    for outcome in outcomes.values():
        whole.add(outcome)
    return {kind: outcome.report() for kind, outcome in outcomes.items()} | {"mix": whole.report()}


def in_turn(texts: Sequence[Text]) -> list[Text]:
    """One of each kind after the other, as mixed traffic comes."""
    kinds: dict[str, list[Text]] = {}
    for text in texts:
        kinds.setdefault(text.kind, []).append(text)
    longest = max(map(len, kinds.values()))
    return [found[i] for i in range(longest) for found in kinds.values() if i < len(found)]


def compare(texts: Sequence[Text], drafter: str, box: spark.Spark, seed: int) -> dict[str, Any]:
    """Every fixed depth and the controller with one drafter."""
    paid = drafter.removeprefix("lookup+")
    fixed = {0: speeds(replay.run(texts, Strategy("", 0, box), seed))}
    for depth in FIXED[paid]:
        fixed[depth] = speeds(replay.run(texts, Strategy(drafter, depth, box), seed))
    strategy = Strategy(drafter, None, box)
    adaptive = speeds(replay.run(texts, strategy, seed))
    assert strategy.controller is not None
    found: dict[str, Any] = {"drafter": drafter, "fixed": fixed, "adaptive": adaptive, "against": {}}
    for kind, own in adaptive.items():
        best = max(fixed, key=lambda depth: fixed[depth][kind]["tokens_per_s"])
        found["against"][kind] = {
            "best_fixed_depth": best,
            "best_fixed": fixed[best][kind]["tokens_per_s"],
            "adaptive": own["tokens_per_s"],
            "ratio": round(own["tokens_per_s"] / fixed[best][kind]["tokens_per_s"], 4),
            "over_no_drafting": round(own["tokens_per_s"] / fixed[0][kind]["tokens_per_s"], 4),
        }
    return found | {"controller": strategy.controller.stats()}


def batches(texts: Sequence[Text], drafter: str, box: spark.Spark) -> list[dict[str, Any]]:
    """Several requests at a time, of different kinds: all kinds together, tokens/s of all of them."""
    found = []
    for together in TOGETHER:

        def speed(strategy: Strategy, together: int = together) -> float:
            outcomes = replay.run(texts, strategy, together=together).values()
            return sum(o.tokens for o in outcomes) / sum(o.seconds for o in outcomes)

        fixed = {0: speed(Strategy("", 0, box))}
        fixed |= {depth: speed(Strategy(drafter, depth, box)) for depth in FIXED[drafter.removeprefix("lookup+")]}
        adaptive, best = speed(Strategy(drafter, None, box)), max(fixed, key=lambda depth: fixed[depth])
        found.append(
            {
                "drafter": drafter,
                "requests": together,
                "no_drafting": round(fixed[0], 1),
                "best_fixed_depth": best,
                "best_fixed": round(fixed[best], 1),
                "adaptive": round(adaptive, 1),
                "ratio": round(adaptive / fixed[best], 3),
            }
        )
    return found


def verdicts(rows: list[dict[str, Any]], comparisons: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What has to hold, and whether it does."""
    worst = max(abs(row["error"]) for row in rows if row["required"])
    found = [{"claim": f"the six published rows within {WITHIN:.0%}", "value": worst, "holds": worst <= WITHIN}]
    for comparison in comparisons:
        name, against = comparison["drafter"], comparison["against"]
        mix = against["mix"]["ratio"]
        found.append({"claim": f"{name}: adaptive / best fixed depth, mix", "value": mix, "holds": mix >= 1.0})
        for kind, row in against.items():
            if kind not in ("mix", INCOMPRESSIBLE):
                claim = f"{name}: adaptive / best fixed depth, {kind}"
                found.append({"claim": claim, "value": row["ratio"], "holds": row["ratio"] >= NEAR})
        if INCOMPRESSIBLE in against:
            value = against[INCOMPRESSIBLE]["over_no_drafting"]
            claim = f"{name}: adaptive / no drafting, {INCOMPRESSIBLE}"
            found.append({"claim": claim, "value": value, "holds": value >= NEAR})
    return found


# -- showing it


def print_published(fitted: spark.Fitted, rows: list[dict[str, Any]]) -> None:
    box = spark.Spark(fitted.fixed_s)
    step_bytes = box.fixed_bytes + spark.TOP_K * box.expert_bytes
    print(
        f"Qwen3.5-122B-A10B, INT4: {step_bytes / spark.GB:.2f} GB a step; at {spark.BANDWIDTH / spark.GB:.0f} GB/s at "
        f"most {spark.BANDWIDTH / step_bytes:.1f} steps/s. Fitted: {fitted.fixed_s * 1e3:.2f} ms of every step are "
        "fixed; tokens choose 8 of "
        + ", ".join(f"{pool:.0f} experts ({text})" for text, pool in fitted.pools.items() if text != "mixed")
        + "; mixed text: mean of prose and code.\n"
    )
    print(f"{'draft':>10}{'text':>7}{'tokens/step':>13}{'published':>11}{'≈ predicted':>13}{'error':>8}  role")
    for row in rows:
        print(
            f"{row['draft']:>10}{row['text']:>7}{row['tokens_per_step']:13.2f}{row['published_tokens_per_s']:11.1f}"
            f"{row['predicted_tokens_per_s']:13.1f}{row['error']:8.1%}  {row['role']}"
            + (", end to end with prefill" if row["scope"] != "decode" else "")
        )


def print_comparison(comparison: dict[str, Any]) -> None:
    kinds = list(comparison["adaptive"])
    print(f"\n{comparison['drafter']}, ≈ tokens/s predicted")
    print(f"{'depth':>10}" + "".join(f"{kind:>9}" for kind in kinds))
    for depth, row in [*comparison["fixed"].items(), ("adaptive", comparison["adaptive"])]:
        print(f"{depth:>10}" + "".join(f"{row[kind]['tokens_per_s']:9.1f}" for kind in kinds))
    print(f"{'of best':>10}" + "".join(f"{comparison['against'][kind]['ratio']:9.3f}" for kind in kinds))


def print_batches(rows: list[dict[str, Any]]) -> None:
    print("\nSeveral requests at a time, mixed kinds, ≈ tokens/s of all together, predicted")
    print(f"{'drafter':>14}{'requests':>10}{'none':>8}{'best fixed':>16}{'adaptive':>10}{'ratio':>8}")
    for row in rows:
        best = f"{row['best_fixed']} at {row['best_fixed_depth']}"
        print(
            f"{row['drafter']:>14}{row['requests']:>10}{row['no_drafting']:8.1f}{best:>16}{row['adaptive']:10.1f}"
            f"{row['ratio']:8.3f}"
        )


def draw(folder: Path, comparison: dict[str, Any]) -> Path:
    panels = {
        kind: (
            [(depth, row[kind]["tokens_per_s"]) for depth, row in comparison["fixed"].items()],
            comparison["adaptive"][kind]["tokens_per_s"],
        )
        for kind in comparison["adaptive"]
    }
    path = folder / f"depth-{comparison['drafter'].replace('+', '-')}.svg"
    chart.write(
        path,
        f"{comparison['drafter']}: tokens/s over drafts per step, predicted for a DGX Spark",
        panels,
        "Simulated clock (Qwen3.5-122B, INT4 + FP8 shared experts + INT8 head, INT4 drafter); acceptance, confidence "
        "and routing recorded from the embedded model.",
    )
    return path


def mean_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The first run with ratios averaged over all, and their lowest."""
    first = runs[0]
    for kind, row in first["against"].items():
        for name in ("ratio", "over_no_drafting"):
            values = [run["against"][kind][name] for run in runs]
            row[name], row[f"lowest_{name}"] = round(sum(values) / len(values), 4), min(values)
    return first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--seeds", type=int, default=3, help="of the noise on step times")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--charts", type=Path, help="folder for one SVG per drafter")
    parser.add_argument("--cpu", type=Path, metavar="MODEL", help="also measure this checkpoint on this machine")
    parser.add_argument("--data", type=Path, default=Path("build/training"), help="held-out code and prose, for --cpu")
    parser.add_argument("--texts", type=int, default=2, help="of each kind, for --cpu")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer, for --cpu")
    parser.add_argument("--rounds", type=int, default=5, help="for --cpu")
    options = parser.parse_args()
    fitted = spark.fit()
    rows = published(fitted)
    print_published(fitted, rows)
    box = spark.Spark(fitted.fixed_s, WEIGHTS)
    texts = in_turn(replay.load(options.traces))
    known = set(texts[0].blocks)
    comparisons = []
    for drafter in DRAFTERS:
        if set(drafter.split("+")) <= known:
            comparisons.append(mean_of([compare(texts, drafter, box, seed) for seed in range(options.seeds)]))
            print_comparison(comparisons[-1])
            if options.charts:
                draw(options.charts, comparisons[-1])
    beside = [row for comparison in comparisons for row in batches(texts, comparison["drafter"], box)]
    print_batches(beside)
    claims = verdicts(rows, comparisons)
    print()
    for claim in claims:
        print(f"{'holds' if claim['holds'] else 'FAILS':>6}  {claim['value']:.3f}  {claim['claim']}")
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.plan.depth " + shlex.join(sys.argv[1:]),
        "versions": {"python": platform.python_version(), "numpy": version("numpy")},
        "what": "speeds are predictions for a DGX Spark, made here by a simulation; none was measured on one",
        "spark": {"fixed_ms": round(fitted.fixed_s * 1e3, 3), "bandwidth_gb_per_s": spark.BANDWIDTH / spark.GB}
        | {"experts_in_use": {text: round(pool, 1) for text, pool in fitted.pools.items()}},
        "published": rows,
        "traces": {
            "file": options.traces.name,
            "tokens": {k: sum(len(t) for t in texts if t.kind == k) for k in dict.fromkeys(t.kind for t in texts)},
            "depths": {name: DEPTHS[name] for name in sorted(known)},
        },
        "noise_seeds": options.seeds,
        "comparisons": comparisons,
        "batches": beside,
        "claims": claims,
    }
    if options.cpu:
        from benchmarks.plan import wall

        report["cpu"] = wall.measure(options.cpu, options.data, options.texts, options.tokens, options.rounds)
        wall.show(report["cpu"])
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"claims": claims}))
    sys.exit(not all(claim["holds"] for claim in claims))


if __name__ == "__main__":
    main()
