"""Are the items of two seeds of `stoker check` as hard? Scores of one server on both:

    python -m benchmarks.server.check_seeds URL [--suite full] [--items 24] [--seeds 1,2] [--json FILE]

The items differ, so the scores are compared unpaired: a permutation of all items among the two seeds, over shares of
fields, calls and rules that are right, which tell more than whole items do where a model gets few of them right.
"""

import argparse
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.server.check_formats import STOKER, run_check
from stoker.check import statistics

DRAWS = 20_000


def unpaired(first: list[float], second: list[float]) -> float:
    """Two-sided p: how often a random split of all scores has means as far apart."""
    both, rng = np.asarray(first + second), np.random.default_rng(0)
    apart = abs(both[: len(first)].mean() - both[len(first) :].mean())
    as_far = 0
    for _ in range(DRAWS):
        drawn = rng.permutation(both)
        as_far += abs(drawn[: len(first)].mean() - drawn[len(first) :].mean()) >= apart - 1e-12
    return (as_far + 1) / (DRAWS + 1)


def scores(url: str, suite: str, seed: str, items: int, concurrency: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "check.json"
        command = [*STOKER, "check", url, "--suite", suite, "--seed", seed, "--items", str(items)]
        found = run_check([*command, "--concurrency", str(concurrency), "--json", str(file)], file)
    by_suite: dict[str, list[float]] = {}
    for asked in found["answers"]:
        score = asked["replies"]["A"]["score"]
        if score is not None:
            by_suite.setdefault(asked["suite"], []).append(score)
    return by_suite


def compared(first: dict[str, list[float]], second: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for suite in first:
        a, b = first[suite], second[suite]
        rows.append(
            {
                "suite": suite,
                "items": [len(a), len(b)],
                "passed": [sum(score >= 1 for score in each) / len(each) for each in (a, b)],
                "parts": [sum(each) / len(each) for each in (a, b)],
                "p": unpaired(a, b),
            }
        )
    for row, adjusted in zip(rows, statistics.holm([row["p"] for row in rows]), strict=True):
        row["p_adjusted"] = adjusted
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--suite", default="full")
    parser.add_argument("--items", type=int, default=24, help="of each suite")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds = options.seeds.split(",")
    found = [scores(options.url, options.suite, seed, options.items, options.concurrency) for seed in seeds]
    rows = compared(*found)
    for row in rows:
        parts, passed = row["parts"], row["passed"]
        print(
            f"{row['suite']:14} parts {parts[0]:.1%} and {parts[1]:.1%}, whole items {passed[0]:.1%} and "
            f"{passed[1]:.1%}, p {row['p']:.3f}, adjusted {row['p_adjusted']:.3f}"
        )
    if options.json:
        date = datetime.now(UTC).date().isoformat()
        result = {
            "benchmark": "check_seeds",
            "date": date,
            "suite": options.suite,
            "seeds": seeds,
            "items": options.items,
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
