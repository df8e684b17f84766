"""How wrong `stoker plan` is on sources it never saw: leave-one-source-out over the published single-stream rows.

    python -m benchmarks.plan_accuracy --json benchmarks/results/plan_accuracy.json   # some minutes
    python -m benchmarks.plan_accuracy --write      # also stores the fit in src/stoker/plan/data/fit.toml

Every row of a source is predicted by a fit on all other sources (posts and repositories of one author are one source).
Printed: the error of all rows, of each source, and of the largest misses; rows that could not be predicted, and why.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from stoker.plan import fit as fitting
from stoker.plan.catalog import DATA
from stoker.plan.coarse import from_counts
from stoker.plan.evidence import measurements
from stoker.plan.fit import Case, Held
from stoker.plan.reads import Draft
from stoker.plan.speed import Fit
from stoker.plan.weigh import weigh

# An NVFP4 checkpoint keeps much in 16 bit: its reads per active weight on the models whose shapes are known, in bits.
NVFP4_AVERAGE = "gguf:9.1"
HEADER = """# Fitted by benchmarks/plan_accuracy.py --write; do not edit. Natural logarithms (speed.py says of what).
# deviations: standard deviations of the values.
# spread: log errors (predicted over published) that 10 % and 90 % of rows of unseen sources stay below.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="store the fit on all rows in the package")
    parser.add_argument("--json", type=Path, help="write rows and summary here")
    parser.add_argument("--times", type=Path, help="only measure how long an answer takes, and write that here")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    if arguments.times:
        arguments.times.write_text(json.dumps(answer_times(), indent=1) + "\n", encoding="utf-8")
        console.print(arguments.times.read_text())
        return
    cases = fitting.cases()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("fitting")
        fits = fitting.fits_without_a_source(
            cases, lambda source, i, n: bar.update(task, description=f"without {source}"[:40], completed=i, total=n)
        )
    held = fitting.leave_one_source_out(cases, fits)
    strangers = fitting.leave_one_source_out(stranger_cases(), fits)
    report = summary(held, strangers)
    show(console, report, held)
    if arguments.write:
        write_fit(fits[""], held)
        console.print(f"Wrote {DATA / 'fit.toml'}.")
    if arguments.json:
        report["rows"] = [as_json(h) for h in held]
        report["rows_by_parameter_count"] = [as_json(h) for h in strangers]
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def stranger_cases() -> list[Case]:
    """Rows of models whose shape is unknown, by parameter count alone."""
    found = []
    for row in measurements():
        model, box = from_counts(row), fitting.box_of(row)
        if fitting.why_not(row) == fitting.UNKNOWN_SHAPE and model and box and row.drafter == "none":
            scheme = fitting.scheme_of(NVFP4_AVERAGE if row.weights == "nvfp4" else row.weights)
            found.append(Case(row, model, weigh(model, scheme), box, Draft()))
    return found


def summary(held: Sequence[Held], strangers: Sequence[Held]) -> dict[str, Any]:
    by_source: dict[str, list[Held]] = {}
    for h in held:
        by_source.setdefault(h.case.row.held_out_with, []).append(h)
    return {
        "what": "leave-one-source-out error of predicted against published single-stream decode tokens/s",
        "all": quantiles(held),
        "graded_A_or_B": quantiles([h for h in held if h.case.row.evidence != "C"]),
        "drafting": quantiles([h for h in held if h.case.draft.drafting]),
        "no_drafting": quantiles([h for h in held if not h.case.draft.drafting]),
        "by_source": {source: quantiles(rows) for source, rows in sorted(by_source.items())},
        "by_parameter_count": quantiles(strangers),
        "all_and_by_parameter_count": quantiles([*held, *strangers]),
        "not_predicted": Counter(reason for row in measurements() if (reason := fitting.why_not(row))),
    }


def quantiles(held: Sequence[Held]) -> dict[str, float]:
    errors = np.array([h.error for h in held])
    bias = float(np.median([h.log_error for h in held]))
    return {
        "rows": len(held),
        "median": round(float(np.median(errors)), 4),
        "p90": round(float(np.quantile(errors, 0.9)), 4),
        "worst": round(float(errors.max()), 4),
        "median_log_error": round(bias, 4),
    }


def as_json(h: Held) -> dict[str, Any]:
    row = h.case.row
    return {
        "id": row.id, "model": row.model, "weights": row.weights, "box": row.box, "boxes": row.boxes,
        "engine": row.engine, "draft": str(h.case.draft), "workload": row.workload, "source": row.source,
        "published": row.decode_tok_s, "predicted": round(h.predicted, 2), "log_error": round(h.log_error, 4),
    }  # fmt: skip


def show(console: Console, report: dict[str, Any], held: Sequence[Held]) -> None:
    table = Table("rows of", "rows", "median error", "90 %", "worst", title="Predicted without the row's source")
    for name in ("all", "graded_A_or_B", "no_drafting", "drafting", "by_parameter_count", "all_and_by_parameter_count"):
        _add(table, name.replace("_", " "), report[name])
    table.add_section()
    for source, row in report["by_source"].items():
        _add(table, source, row)
    console.print(table)
    worst = Table("id", "model", "weights", "box", "engine", "draft", "workload", "published", "predicted",
                  title="Largest misses")  # fmt: skip
    for h in sorted(held, key=lambda h: -h.error)[:12]:
        row = h.case.row
        worst.add_row(row.id, row.model, row.weights, row.box, row.engine, str(h.case.draft), row.workload[:28],
                      f"{row.decode_tok_s}", f"{h.predicted:.1f}")  # fmt: skip
    console.print(worst)
    for reason, count in report["not_predicted"].items():
        console.print(f"{count:4d} rows not predicted: {reason}")


def _add(table: Table, name: str, row: dict[str, float]) -> None:
    table.add_row(name, f"{row['rows']}", f"{row['median']:.1%}", f"{row['p90']:.1%}", f"{row['worst']:.0%}")


def write_fit(fit: Fit, held: Sequence[Held]) -> None:
    values = {**fit.values, **fitting.fit_prefill()}
    lines = [HEADER, "[values]"]
    lines += [f'"{name}" = {value}' for name, value in sorted(values.items())]
    lines += ["", "[deviations]"]
    lines += [f'"{name}" = {value}' for name, value in sorted(fit.deviations.items())]
    lines += ["", "[spread]"]
    lines += [f'"{engine}" = [{low}, {high}]' for engine, (low, high) in sorted(fitting.spread_of(held).items())]
    (DATA / "fit.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def answer_times() -> dict[str, Any]:
    """Seconds of `stoker plan`, best of ten: its own work from import to answer, and the whole process."""
    code = (
        "import sys, time; wall, cpu = time.perf_counter(), time.process_time(); "
        "from stoker.plan.answer import Question, answer; answer(Question('122b', 'spark')); "
        "assert 'torch' not in sys.modules; print(time.perf_counter() - wall, time.process_time() - cpu)"
    )
    inside = [tuple(map(float, _run("-c", code).split())) for _ in range(10)]
    whole = []
    for _ in range(10):
        start = time.perf_counter()
        _run("-c", "from stoker.cli.main import run; run()", "plan", "122b", "--box", "spark", "--json")
        whole.append(time.perf_counter() - start)
    return {
        "answer_s": round(min(wall for wall, _ in inside), 3),
        "answer_cpu_s": round(min(cpu for _, cpu in inside), 3),
        "process_s": round(min(whole), 3),
        "load_average": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
    }


def _run(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
