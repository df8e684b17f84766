"""`stoker inspect`: describes a checkpoint, checks that it is complete, and says how to repair it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.progress import byte_progress, error_console, output_console
from stoker.demo import checkpoint_at
from stoker.errors import visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from stoker.checkpoint.inspect.report import Inspection

SPARK_GB_PER_S = 273  # of the box most of these checkpoints are built for


def inspect(
    model: Annotated[str, typer.Argument(help="A checkpoint directory, or demo: the embedded model.")],
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read every byte: NaN, Inf, and checksums (stoker.json, *.sha256, the hub's)."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> None:
    """Say what a checkpoint is, what a step reads of it, and everything that is wrong with it."""
    from stoker.checkpoint.inspect.report import inspect as look

    directory = checkpoint_at(model)
    report = _verify_with_progress(directory) if verify else look(directory)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        _print(report, output_console())
    if report.errors:
        raise typer.Exit(1)


def _verify_with_progress(directory: Path) -> "Inspection":
    from stoker.checkpoint.inspect.report import inspect as look

    with byte_progress(error_console()) as bar:
        task = bar.add_task("verifying", total=None)
        return look(
            directory,
            verify_bytes=True,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _print(report: "Inspection", console: "Console") -> None:
    console.print(visible(report.directory.name or str(report.directory), keep=""), style="bold", markup=False)
    for line in _summary(report):
        console.print(line, markup=False)
    console.print(_table(report))
    for line in _facts(report):
        console.print(line, markup=False)
    for problem in report.problems:
        console.print()
        console.print(_problem(problem.severity, problem.message, problem.fix))
    console.print()
    style = "bold red" if report.errors else "bold green"
    console.print(report.verdict, style=style, markup=False)
    if len(report.errors) > 1:
        console.print(f"Begin with: {report.errors[0].fix}", markup=False)


def _summary(report: "Inspection") -> list[str]:
    lines, config = [], report.config
    kinds = []
    if config:
        kinds = [(len(config.linear_layers), "DeltaNet"), (len(config.full_layers), "attention")]
    shape = " + ".join(f"{number} {kind}" for number, kind in kinds if number)
    line = f"{report.architecture}: {config.num_layers} layers ({shape})" if config else report.architecture
    if config and config.moe:
        shared = " + shared" if config.moe.shared_intermediate_size else ""
        line += f", {config.moe.top_k} of {config.moe.num_experts} experts{shared}"
    lines.append(line)
    by_group = {group.name: group.parameters for group in report.groups}
    beside = [f"{_billions(by_group[name])} {name}" for name in ("MTP", "vision") if by_group.get(name)]
    line = f"{_billions(report.parameters)} parameters" + (f" ({', '.join(beside)})" if beside else "")
    active = report.active_parameters
    lines.append(f"{line}, {_billions(active)} active per token" if active else line)
    tensors = sum(group.tensors for group in report.groups)
    lines.append(f"{tensors:,} tensors in {report.files} files, {_size(report.bytes_on_disk)}")
    return lines


def _table(report: "Inspection") -> "RenderableType":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("part", no_wrap=True)
    table.add_column("format")
    for name in ("tensors", "on disk", "per step"):
        table.add_column(name, justify="right", no_wrap=True)
    step = dict(report.step.items) if report.step else {}
    for group in report.groups:
        read = step.pop(group.name, 0)
        shown = (f"{group.tensors:,}", _size(group.bytes), _size(read) if read else "–")
        table.add_row(group.name, group.format, *shown)
    for name, size in step.items():  # recurrent states, which are in no file
        if size:
            table.add_row(name, "read + write" if "state" in name else "the embedding", "", "", _size(size))
    table.add_section()
    total = _size(report.step.total) if report.step else "–"
    table.add_row("total", "", "", _size(sum(group.bytes for group in report.groups)), total, style="bold")
    return table


def _facts(report: "Inspection") -> list[str]:
    lines, mtp, step = [], report.mtp, report.step
    if step and step.total:
        line = f"A step reads {_size(step.total)} and {_size(step.kv_bytes_per_token)} per token of context"
        if step.total > 1e8:  # below that, memory bandwidth does not limit the speed
            line += (
                f": at {SPARK_GB_PER_S} GB/s (DGX Spark) no more than {SPARK_GB_PER_S * 1e9 / step.total:.1f} steps/s"
            )
        lines.append(f"{line}.")
    if mtp.present:
        whole = "complete" if mtp.complete else "not complete"
        sane = {True: "sane", False: "NOT SANE", None: "not judged"}[mtp.sane]
        line = f"MTP head: {mtp.found:,} of {mtp.expected:,} tensors, {whole}, {sane}"
        if step and step.draft_bytes:
            line += f"; a draft reads {_size(step.draft_bytes)}"
        lines.append(f"{line}.")
    elif mtp.expected:
        lines.append(f"MTP head: none of {mtp.expected:,} tensors.")
    if report.verified:
        seen = report.verified
        line = f"Verified {_size(seen.bytes)}: {seen.matching} checksum{'s' if seen.matching != 1 else ''} right"
        if seen.without_checksum:
            line += f", {len(seen.without_checksum)} of {seen.files} safetensors files came without one"
        lines.append(f"{line}.")
    return lines


def _problem(severity: str, message: str, fix: str) -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=5)
    grid.add_column(overflow="fold")
    grid.add_row(Text(severity, "red" if severity == "error" else "yellow"), Text(message))
    if fix:
        grid.add_row("", Text(f"→ {fix}", "dim"))
    return grid


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"
