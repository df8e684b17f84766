"""`stoker report`: results of `stoker bench` again, as table or page, or compared; receipts of `stoker up` likewise."""

import json
from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.progress import check_writable, error_console, output_console, write_result
from stoker.errors import BenchError


def report(
    files: Annotated[
        list[Path], typer.Argument(help="A result of stoker bench --json, or two to compare; or receipts.")
    ],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result; - is stdout.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with charts: one file, no network needed.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write llama-benchy's CSV, for Spark Arena.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table as Markdown.")] = None,
) -> None:
    """Show a result again, or compare two: medians, 95 % intervals, and whether noise explains the difference.

    Receipts of stoker up, any number of them, are compared with the first one.
    """
    from stoker.bench.document import compared, load
    from stoker.cli.bench import write

    if any(map(_is_receipt, files)):
        if html or csv or markdown:
            raise BenchError("receipts are shown as a table or with --json; other forms are of results of stoker bench")
        check_writable(json_file)
        _receipts(files, json_file)
        return
    if len(files) > 2:
        raise BenchError(f"{len(files)} files were given; one is shown, two are compared")
    check_writable(json_file, html, csv, markdown)
    found = [load(path) for path in files]
    write(compared(*found) if len(found) == 2 else found[0], json_file, html, csv, markdown, error_console())


def _is_receipt(path: Path) -> bool:
    """Not if it cannot be read: then it is treated as a result, whose reader says why."""
    from stoker.up.receipt import is_receipt

    try:
        return is_receipt(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return False


def _receipts(files: list[Path], json_file: Path | None) -> None:
    from stoker.report.receipts import compared, remarks, table
    from stoker.up.receipt import read

    found = [read(path) for path in files]
    to_stdout = str(json_file) == "-"
    console = error_console() if to_stdout else output_console()
    console.print(table(files, found))
    for line in remarks(found):
        console.print(line, markup=False, soft_wrap=True)
    document = json.dumps(compared(found), indent=2) + "\n"
    if to_stdout:
        typer.echo(document, nl=False)
    elif json_file:
        write_result(json_file, document)
        console.print(f"wrote {json_file}", markup=False)
