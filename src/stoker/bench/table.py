"""A result in the terminal."""

from typing import TYPE_CHECKING

from stoker.bench import show
from stoker.bench.compare import statement
from stoker.bench.record import Difference, Document
from stoker.bench.summary import title

if TYPE_CHECKING:
    from rich.console import Console

ROOMY = 92  # columns
SHOWN = ("decode_tokens_per_s", "ttft_s", "accepted_per_step")
NAMES = {"decode_tokens_per_s": "decode tok/s", "ttft_s": "TTFT s", "accepted_per_step": "tok/step"}


def print_document(found: Document, console: "Console") -> None:
    from rich import box
    from rich.table import Table

    for server in found.environment.servers:
        context = f", context {server.context:,}" if server.context else ""
        line = f"{server.name}: {server.model} at {server.url} ({server.engine}{context})"
        console.print(f"{line}; prompts fitted by {server.tokenizer}", style="dim", markup=False, soft_wrap=True)
    console.print(show.quality(found), markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("workload", no_wrap=True)
    roomy = not console.is_terminal or console.width >= ROOMY
    kept = [place for place, head in enumerate(show.HEADS) if roomy or head not in show.WIDE]
    for place in kept[1:]:
        table.add_column(show.HEADS[place], justify="right", no_wrap=True)
    for row in found.workloads:
        cells = show.cells(row, show.two_servers(found))
        table.add_row(*(cells[place] for place in kept), style="red" if row.failed and not row.completed else None)
    console.print(table)
    for line in (*show.turns(found), *show.throughput(found), *show.prefix(found)):
        console.print(line, markup=False, soft_wrap=True)
    if found.differences:
        print_differences(found.differences, console)
    for line in (show.noise(found), show.client(found)):
        if line:
            console.print(line, style="dim", markup=False, soft_wrap=True)
    if any("estimate" in row.steps_source for row in found.workloads):
        console.print("* estimated", style="dim")
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    for failure in show.failures(found):
        console.print(f"failed: {failure}", style="red", markup=False, soft_wrap=True)
    console.print(found.headline.text, style="bold", markup=False, soft_wrap=True)


def print_differences(found: list[Difference], console: "Console") -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title="B against A")
    table.add_column("workload", no_wrap=True)
    table.add_column("metric", no_wrap=True)
    for head in ("A", "B", "change", "95 %", "runs"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    colours = {"better": "green", "worse": "red"}
    for row in found:
        if row.metric not in SHOWN:
            continue
        digits = 3 if row.metric == "ttft_s" else 2 if row.metric == "accepted_per_step" else 1
        table.add_row(
            title(row),
            NAMES[row.metric],
            f"{row.a:.{digits}f}",
            f"{row.b:.{digits}f}",
            f"{row.change:+.1%}",
            f"{row.ci_low:+.1%} … {row.ci_high:+.1%}",
            f"{row.runs_a}+{row.runs_b}" + (" paired" if row.paired else ""),
            row.verdict,
            style=colours.get(row.verdict),
        )
    console.print(table)
    console.print(statement(found), markup=False, soft_wrap=True)
