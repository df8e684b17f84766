"""`stoker report`: results of `stoker bench` again, as table or page, or two of them compared."""

from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.progress import check_writable, error_console
from stoker.errors import BenchError


def report(
    files: Annotated[list[Path], typer.Argument(help="One result of stoker bench --json, or two to compare.")],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result; - is stdout.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with charts: one file, no network needed.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write llama-benchy's CSV, for Spark Arena.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table as Markdown.")] = None,
) -> None:
    """Show a result again, or compare two: medians, 95 % intervals, and whether noise explains the difference."""
    from stoker.bench.document import compared, load
    from stoker.cli.bench import write

    if len(files) > 2:
        raise BenchError(f"{len(files)} files were given; one is shown, two are compared")
    check_writable(json_file, html, csv, markdown)
    found = [load(path) for path in files]
    write(compared(*found) if len(found) == 2 else found[0], json_file, html, csv, markdown, error_console())
