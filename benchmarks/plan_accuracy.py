"""How wrong `stoker plan` is on sources it never saw: leave-one-source-out over the published single-stream rows.

    python -m benchmarks.plan_accuracy --json benchmarks/results/plan_accuracy.json   # some minutes
    python -m benchmarks.plan_accuracy --write      # also stores the fit in src/stoker/plan/data/fit.toml

Every row of a source is predicted by a fit on all other sources (posts and repositories of one author are one source).
Printed: the error of all rows, of each source, and of the largest misses; rows that could not be predicted, and why.
"""

import argparse
import json
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
# spread: log errors (predicted over published) that 10 % and 90 % of rows of unseen sources stay below.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="store the fit on all rows in the package")
    parser.add_argument("--json", type=Path, help="write rows and summary here")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    cases = fitting.cases()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("holding out")
        held = fitting.leave_one_source_out(
            cases, lambda source, i, n: bar.update(task, description=source[:40], completed=i, total=n)
        )
        strangers = predict_strangers(cases)
    report = summary(held, strangers)
    show(console, report, held)
    if arguments.write:
        write_fit(cases, held)
        console.print(f"Wrote {DATA / 'fit.toml'}.")
    if arguments.json:
        report["answer"] = answer_times()
        report["rows"] = [as_json(h) for h in held]
        report["rows_by_parameter_count"] = [as_json(h) for h in strangers]
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def predict_strangers(cases: Sequence[Case]) -> list[Held]:
    """Rows of models whose shape is unknown, by parameter count alone, from fits that saw nothing of their source."""
    fits: dict[str, Fit] = {}
    held = []
    for row in measurements():
        model, box = from_counts(row), fitting.box_of(row)
        if fitting.why_not(row) != fitting.UNKNOWN_SHAPE or not model or not box or row.drafter != "none":
            continue
        if row.held_out_with not in fits:
            others = [case for case in cases if case.row.held_out_with != row.held_out_with]
            fits[row.held_out_with] = fitting.fit_to(others)
        scheme = fitting.scheme_of(NVFP4_AVERAGE if row.weights == "nvfp4" else row.weights)
        case = Case(row, model, weigh(model, scheme), box, Draft())
        held.append(Held(case, case.predict(fits[row.held_out_with])))
    return held


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
    for name in ("all", "graded_A_or_B", "no_drafting", "drafting", "by_parameter_count"):
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


def write_fit(cases: Sequence[Case], held: Sequence[Held]) -> None:
    values = {**fitting.fit_to(cases).values, **fitting.fit_prefill()}
    lines = [HEADER, "[values]"]
    lines += [f'"{name}" = {value}' for name, value in sorted(values.items())]
    lines += ["", "[spread]"]
    lines += [f'"{engine}" = [{low}, {high}]' for engine, (low, high) in sorted(fitting.spread_of(held).items())]
    (DATA / "fit.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def answer_times() -> dict[str, float]:
    """Seconds `stoker plan` takes: its own work after imports, and the whole process."""
    code = (
        "import time, sys; t = time.perf_counter(); from stoker.plan.answer import answer, Question; "
        "answer(Question('122b', 'spark')); d = time.perf_counter() - t; "
        "assert 'torch' not in sys.modules; print(d)"
    )
    inside = min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(5))
    command = [
        sys.executable,
        "-c",
        "from stoker.cli.main import run; run()",
        "plan",
        "122b",
        "--box",
        "spark",
        "--json",
    ]
    whole = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        whole.append(time.perf_counter() - start)
    return {"answer_s": round(inside, 3), "process_s": round(min(whole), 3)}


if __name__ == "__main__":
    main()
