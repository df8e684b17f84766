"""How wrong `stoker plan` is on sources it never saw: leave-one-source-out over the published single-stream rows.

    python -m benchmarks.plan.accuracy --json benchmarks/results/plan_accuracy.json   # some minutes
    python -m benchmarks.plan.accuracy --write      # also stores the fit in src/stoker/plan/data/fit.toml
    python -m benchmarks.plan.accuracy --times benchmarks/results/plan_answer.json   # how long an answer takes

Every row of a source is predicted by a fit on all other sources (posts and repositories of one author are one source)
and corrected by rows of other sources alone. Printed: the error of all rows, of each source, and of the largest
misses; rows that could not be predicted, and why; and how the ranges that `stoker plan` shows, for which all rows
count, hold the rows of the same recipe."""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tools import plan_fit as fitting
from tools.plan_fit import Held

from stoker.plan.cases import cases_of, why_not
from stoker.plan.catalog import DATA
from stoker.plan.evidence import COUNTING, measurements
from stoker.plan.speed import AS, Fit, fitted

HEADER = """# Fitted by benchmarks/plan/accuracy.py --write; do not edit. Natural logarithms (speed.py says of what).
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
    strangers = fitting.leave_one_source_out(fitting.cases(shape_known=False), fits)
    others = {
        "several users": [case for case in fitting.all_cases() if case.row.users > 1],
        "one user, acceptance assumed": [case for case in fitting.all_cases() if case.row.users == 1 and case.assumed],
    }
    report = summary(held, strangers)
    report["uncorrected"] = quantiles(
        [h for group in (cases, fitting.cases(shape_known=False))
         for h in fitting.leave_one_source_out(group, fits, correcting=False)]
    )  # fmt: skip
    report["beside"] = {name: quantiles(fitting.leave_one_source_out(group, fits)) for name, group in others.items()}
    report["ranges"] = ranges(fits[""])
    show(console, report, held)
    if arguments.write:
        write_fit(fits[""], fitting.leave_one_source_out(cases, fits, correcting=False))
        console.print(f"Wrote {DATA / 'fit.toml'}.")
    if arguments.json:
        report["command"] = " ".join(("python -m benchmarks.plan.accuracy", *sys.argv[1:]))
        report["rows"] = [as_json(h) for h in held]
        report["rows_by_parameter_count"] = [as_json(h) for h in strangers]
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def summary(held: Sequence[Held], strangers: Sequence[Held]) -> dict[str, Any]:
    by_source: dict[str, list[Held]] = {}
    for h in (*held, *strangers):
        by_source.setdefault(h.case.row.held_out_with, []).append(h)
    return {
        "what": "leave-one-source-out error of predicted against published single-stream decode tokens/s",
        "all": quantiles([*held, *strangers]),
        "shape_known": quantiles(held),
        "shape_known, graded_A_or_B": quantiles([h for h in held if h.case.row.evidence != "C"]),
        "shape_known, no_drafting": quantiles([h for h in held if not h.case.draft.drafting]),
        "shape_known, drafting": quantiles([h for h in held if h.case.draft.drafting]),
        "by_parameter_count": quantiles(strangers),
        "by_source": {source: quantiles(rows) for source, rows in sorted(by_source.items())},
        "predicted_above_the_physical_limit": sum(h.predicted > h.limit for h in (*held, *strangers)),
        "not_predicted": Counter(reason for row in measurements() if (reason := why_not(row))),
    }


def ranges(fit: Fit) -> dict[str, Any]:
    """The ranges of `stoker plan`, asked for each row's own case: how wide, and whether they hold what was measured."""
    single: list[Held] = []
    graded: list[Held] = []
    for told in (True, False):  # the acceptance, as with --accept-length, or assumed, as without
        cases = [case for case in cases_of(measurements(), blind=not told) if case.assumed != told]
        found = fitting.corrected(cases, measurements(), fit, fitted().spread, blind=not told)
        single += [h for h in found if h.case.row.users == 1 and told]
        graded += [h for h in found if h.case.row.evidence == "A" and h.case.row.kind != COUNTING]
    spread = fitted().spread
    before = [spread.get(AS.get(h.case.row.engine, h.case.row.engine), spread["all"]) for h in single]
    return {
        "what": "ranges as shown, all rows known; the width is the logarithm of the ends' ratio",
        "rows": len(single),
        "median_width": round(float(np.median([h.width for h in single])), 4),
        "median_width_without_correction": round(float(np.median([high - low for low, high in before])), 4),
        "grade_A_rows": len(graded),
        "grade_A_rows_held": sum(h.holds for h in graded),
        "grade_A_rows_not_held": [h.case.row.id for h in graded if not h.holds],
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
        "in_range": round(float(np.mean([h.holds for h in held])), 4),
    }


def as_json(h: Held) -> dict[str, Any]:
    row = h.case.row
    return {
        "id": row.id, "model": row.model, "weights": row.weights, "box": row.box, "boxes": row.boxes,
        "engine": row.engine, "draft": str(h.case.draft), "workload": row.workload, "source": row.source,
        "published": row.decode_tok_s, "predicted": round(h.predicted, 2), "uncorrected": round(h.uncorrected, 2),
        "low": round(h.low, 2), "high": round(h.high, 2), "log_error": round(h.log_error, 4),
    }  # fmt: skip


def show(console: Console, report: dict[str, Any], held: Sequence[Held]) -> None:
    table = Table("rows of", "rows", "median error", "90 %", "worst", title="Predicted without the row's source")
    for name, row in (*report.items(), *report["beside"].items()):
        if isinstance(row, dict) and "median" in row:
            _add(table, name.replace("_", " "), row)
    table.add_section()
    for source, row in report["by_source"].items():
        _add(table, source, row)
    console.print(table)
    worst = Table("id", "model", "weights", "box", "engine", "draft", "workload", "published", "predicted",
                  title="Largest misses, shape known")  # fmt: skip
    for h in sorted(held, key=lambda h: -h.error)[:12]:
        row = h.case.row
        worst.add_row(row.id, row.model, row.weights, row.box, row.engine, str(h.case.draft), row.workload[:28],
                      f"{row.decode_tok_s}", f"{h.predicted:.1f}")  # fmt: skip
    console.print(worst)
    console.print(f"{report['predicted_above_the_physical_limit']} predictions above the physical limit")
    found = report["ranges"]
    missing = f"; not: {', '.join(found['grade_A_rows_not_held'])}" if found["grade_A_rows_not_held"] else ""
    console.print(
        f"Ranges as shown: median width {found['median_width']} (without correction "
        f"{found['median_width_without_correction']}); {found['grade_A_rows_held']} of {found['grade_A_rows']} grade-A "
        f"rows lie within that of their own case{missing}."
    )
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
    """Seconds of `stoker plan`, best of ten, from the interpreter's first statement to the last line printed. Time of
    the processor is what a quiet machine would take; others' work on this one stretches the time on the clock."""
    code = (
        "import sys, time; wall, cpu = time.perf_counter(), time.process_time(); "
        "from stoker.cli.main import app; app(sys.argv[1:], standalone_mode=False); "
        "assert 'torch' not in sys.modules; "
        "print(time.perf_counter() - wall, time.process_time() - cpu, file=sys.stderr)"
    )
    found: dict[str, Any] = {"what": "stoker plan 122b --box spark, from the interpreter's start, best of ten"}
    for name, option in (("tables", ()), ("json", ("--json",))):
        arguments = ["plan", "122b", "--box", "spark", *option]
        times = [tuple(map(float, _run("-c", code, *arguments).stderr.split())) for _ in range(10)]
        found[f"{name}_s"] = round(min(wall for wall, _ in times), 3)
        found[f"{name}_cpu_s"] = round(min(cpu for _, cpu in times), 3)
    return {**found, "load_average": round(os.getloadavg()[0], 1), "cores": os.cpu_count()}


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True)


if __name__ == "__main__":
    main()
