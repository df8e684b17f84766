"""What a box report says: the machine without its owner's name, a table for the terminal, a text to post. No torch."""

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import stoker

GIB = 1 << 30
ROOT = Path(__file__).parents[2]
WIDTH = 126  # characters of the widest table
COLUMNS = ("weights", "batch", "drafts", "context", "tokens/s", "steps/s", "ceiling", "of it", "predicted tokens/s")


def host() -> dict[str, Any]:
    """Processor, system and what runs: nothing that tells whose machine it is."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": f"{_os_name()}, {platform.system()} {platform.release()} {platform.machine()}",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "python": platform.python_version(),
        "stoker": stoker.__version__,
        "commit": commit(),
    }


def commit() -> str:
    """Empty where this is no clone."""
    found = _output("git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD")
    changed = found and _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return f"{found}, changed" if changed else found


def processor() -> str:
    """Arm's cpuinfo has no name; lscpu knows it by its numbers."""
    listing = _read("/proc/cpuinfo") + "\n" + _output("lscpu")
    named = re.findall(r"^model name\s*:\s*(.+?)\s*$", listing, re.IGNORECASE | re.MULTILINE)
    names = [name for name in dict.fromkeys(named) if name != "-"]
    return " and ".join(names) or platform.machine()


def _os_name() -> str:
    found = re.search(r'^PRETTY_NAME="?([^"\n]+)', _read("/etc/os-release"), re.MULTILINE)
    return found[1] if found else platform.system()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _output(program: str, *arguments: str) -> str:
    if not shutil.which(program):
        return ""
    try:
        return subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def without_paths(text: str) -> str:
    """Folders carry user names; a file's own name says enough."""
    home = str(Path.home())
    text = text.replace(home, "~") if len(home) > 1 else text
    return re.sub(r"(?<![\w.])(?:/[\w.+@-]+)+/([\w.+@-]+)", r"\1", text)


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table, in the order of COLUMNS."""
    drafts = row["draft"]
    if row.get("acceptance_source") == "assumed":
        drafts += f", {row['accept_length']:.2f} per step assumed"
    first = [row["weights"], str(row["batch"]), drafts, f"{row['context']:,}"]
    if "error" in row:
        return [*first, "failed", "", "", "", _prediction(row)]
    whole = row["whole"]
    about = "" if whole["source"] == "measured" else "≈ "
    return [
        *first,
        f"{about}{whole['tokens_per_s']:.1f}",
        f"{about}{whole['steps_per_s']:.1f}",
        f"{whole['ceiling_steps_per_s']:.1f}",
        f"{about}{whole['fraction_of_ceiling']:.0%}",
        _prediction(row),
    ]


def _prediction(row: dict[str, Any]) -> str:
    found = row.get("predicted")
    return f"≈ {found['tokens_per_s']:.1f} ({found['low']:.0f}-{found['high']:.0f})" if found else "-"


def line(row: dict[str, Any]) -> str:
    """For the log while rows are measured."""
    place = f"{row['weights']:7} batch {row['batch']} {row['draft']:10} context {row['context']:6,}"
    if "error" in row:
        return f"{place}: failed: {row['error']}"
    whole = row["whole"]
    return (
        f"{place}: ceiling {whole['ceiling_steps_per_s']:.1f} steps/s, {whole['source']} {whole['steps_per_s']:.1f}, "
        f"{whole['tokens_per_s']:.1f} tokens/s"
    )


def remarks(report: dict[str, Any]) -> list[str]:
    """What a reader must know beside the numbers; what went wrong comes first."""
    rows = report["rows"]
    failed, good = [row for row in rows if "error" in row], [row for row in rows if "error" not in row]
    found = [f"FAILED: {row['weights']}, batch {row['batch']}, {row['draft']}: {row['error']}" for row in failed]
    found += [
        f"FAILED CHECK: {name}: {json.dumps(check)}" for name, check in report["checks"].items() if not passed(check)
    ]
    found += [
        f"DOES NOT COUNT: {row['weights']}, batch {row['batch']}, {row['draft']}: {row['distinct_experts']:.1f} "
        f"distinct experts a layer, {row['distinct_expected']:.1f} expected."
        for row in good
        if not row["counts"]
    ]
    if missing := report["planned_rows"] - len(rows):
        found.append(f"STOPPED EARLY: {missing} of {report['planned_rows']} rows were not measured.")
    if report["layers"] < report["all_layers"]:
        found.append(
            f"{report['layers']} of {report['all_layers']} layers were measured: speeds with ≈ are extrapolated to all "
            "of them, by what these took longer than half of them."
        )
    found.append(
        "Speeds are measured with random weights and independent routing; the host reads the tokens of each step. "
        "Ceiling: measured bandwidth over the bytes a step must read, in steps/s. Random weights accept no drafts: "
        "tokens per step are assumed where there are any."
    )
    if any(row.get("predicted") for row in rows):
        found.append(
            "Predicted: by Stoker's planner from the bandwidth measured here, with its interval. It assumes that a "
            "step costs beside its reads what vLLM's does."
        )
    if report["checks"] and all(passed(check) for check in report["checks"].values()):
        found.append(
            "Checked here, bit for bit: logits of a block of tokens, alone and beside other sequences, equal those of "
            f"single tokens ({', '.join(report['checks'])})."
        )
    return found


def passed(check: dict[str, Any]) -> bool:
    return all(value for name, value in check.items() if name != "block")


def post(report: dict[str, Any]) -> str:
    """Markdown that reads as plain text too."""
    machine, speed = report["machine"], report["bandwidth"]
    shared = "shared with the host" if machine["unified"] else "of its own"
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    source = f"stoker {machine['stoker']}" + (f" ({machine['commit']})" if machine["commit"] else "")
    facts = [
        ("GPU", f"{machine['gpu']}, {machine['gpu_memory'] / GIB:.1f} GiB {shared}{driver}"),
        ("host", f"{machine['processor']}, {machine['cores']} cores; {machine['system']}"),
        ("software", f"{source}, torch {machine['torch']}, triton {machine['triton']}, Python {machine['python']}"),
        ("bandwidth", f"{speed['read'] / 1e9:,.1f} GB/s read, {speed['copy'] / 1e9:,.1f} GB/s copied, measured"),
        ("network", f"{report['shape']}, {report['layers']} of {report['all_layers']} layers, random weights"),
    ]
    lines = [f"### Stoker box report: {machine['gpu']}, {report['date']}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {said} |" for name, said in facts]
    lines += ["", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(cells(row))} |" for row in report["rows"]]
    lines += ["", *(f"- {remark}" for remark in remarks(report))]
    lines += ["", f"To repeat: `{report['command']}` in a clone of Stoker; nothing is downloaded.", ""]
    return "\n".join(lines)


def show(report: dict[str, Any]) -> None:
    """The table, where rich is installed and the terminal has room for it; the text to post has it too."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return
    table = Table(title=f"{report['machine']['gpu']}: {report['shape']}, random weights")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("weights", "drafts") else "right")
    for row in report["rows"]:
        table.add_row(*cells(row), style=None if row.get("counts") else "red")
    console = Console()
    if console.width >= WIDTH:
        console.print(table)


@contextmanager
def progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Two functions: what is done now, one of `total` things, and a line that stays."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        yield _plain(total), lambda text: print(text, flush=True)
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(20), MofNCompleteColumn()
    # once a second: drawing takes the interpreter from the loop that is timed
    where = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=where, refresh_per_second=1, transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = False

        def now(text: str) -> None:
            nonlocal begun
            bar.update(task, description=text, advance=1 if begun else 0)
            begun = True

        yield now, lambda text: bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _plain(total: int) -> Callable[[str], None]:
    count = iter(range(1, total + 1))
    return lambda text: print(f"[{next(count, total)}/{total}] {text} ...", flush=True)
