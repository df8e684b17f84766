"""A benchmark's result as text: tables in the terminal, and Markdown to be pasted into an issue or a forum."""

from typing import TYPE_CHECKING

from stoker.bench.compare import statement
from stoker.bench.record import Difference, Document
from stoker.report import figures

if TYPE_CHECKING:
    from rich.console import Console

ROOMY = 92  # columns


def print_document(found: Document, console: "Console") -> None:
    from rich import box
    from rich.table import Table

    for server in found.environment.servers:
        context = f", context {server.context:,}" if server.context else ""
        line = f"{server.name}: {server.model} at {server.url} ({server.engine}{context})"
        console.print(f"{line}; prompts fitted by {server.tokenizer}", style="dim", markup=False, soft_wrap=True)
    console.print(figures.quality(found), markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("workload", no_wrap=True)
    roomy = not console.is_terminal or console.width >= ROOMY
    kept = [place for place, head in enumerate(figures.HEADS) if roomy or head not in figures.WIDE]
    for place in kept[1:]:
        table.add_column(figures.HEADS[place], justify="right", no_wrap=True)
    for row in found.workloads:
        cells = figures.cells(row, figures.two_servers(found))
        table.add_row(*(cells[place] for place in kept), style="red" if row.failed and not row.completed else None)
    console.print(table)
    for line in (*figures.turns(found), *figures.agreement(found), *figures.throughput(found), *figures.prefix(found)):
        console.print(line, markup=False, soft_wrap=True)
    if found.differences:
        print_differences(found.differences, console)
    for line in (figures.noise(found), figures.client(found)):
        if line:
            console.print(line, style="dim", markup=False, soft_wrap=True)
    if any("estimate" in row.steps_source for row in found.workloads):
        console.print("* estimated", style="dim")
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    for failure in figures.failures(found):
        console.print(f"failed: {failure}", style="red", markup=False, soft_wrap=True)
    console.print(found.headline.text, style="bold", markup=False, soft_wrap=True)


def print_differences(found: list[Difference], console: "Console") -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title="B against A")
    for head in figures.COMPARED_HEADS:
        words = head in ("workload", "metric", "verdict")
        table.add_column(head, justify="left" if words else "right", no_wrap=True)
    colours = {"better": "green", "worse": "red"}
    for row in found:
        if row.metric in figures.METRICS:
            table.add_row(*figures.compared_cells(row), style=colours.get(row.verdict))
    console.print(table)
    console.print(statement(found), markup=False, soft_wrap=True)


def markdown(found: Document) -> str:
    environment, two = found.environment, figures.two_servers(found)
    lines = [f"**{found.headline.text}**", ""]
    lines += [f"| {' | '.join(figures.HEADS)} |", f"|---|{'---:|' * (len(figures.HEADS) - 1)}"]
    lines += [f"| {' | '.join(figures.cells(row, two))} |" for row in found.workloads]
    lines.append("")
    extra = [*figures.turns(found), *figures.agreement(found), *figures.throughput(found), *figures.prefix(found)]
    extra += [figures.quality(found), figures.noise(found), figures.client(found)]
    extra += [f"Warning: {warning}" for warning in found.warnings]
    extra += [f"Failed: {line}" for line in figures.failures(found)]
    lines += [f"- {line}" for line in extra if line]
    lines.append("")
    for server in environment.servers:
        context = f", context {server.context:,}" if server.context else ""
        lines.append(
            f"{server.name}: `{server.model}` on {server.engine}{context}; prompts fitted by {server.tokenizer}."
        )
    gpus = f", {', '.join(environment.gpus)}" if environment.gpus else ""
    lines.append(
        f"Measured {environment.started} from {environment.processor} ({environment.cpus} CPUs{gpus}) by stoker "
        f"{environment.stoker}: `{environment.command}`"
    )
    return "\n".join(lines) + "\n"
