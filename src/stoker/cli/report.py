"""`stoker report`: results of `stoker bench` and `stoker check` again, as table or page, or compared; receipts too."""

import json
from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.progress import check_writable, error_console, output_console, write_result
from stoker.errors import BenchError


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="A result of stoker bench or stoker check, or two to compare; or several checks or receipts."
        ),
    ],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result; - is stdout.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with charts: one file, no network needed.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write llama-benchy's CSV, for Spark Arena.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table as Markdown.")] = None,
) -> None:
    """Show a result again, or compare two: medians, 95 % intervals, and whether noise explains the difference.

    Checks and receipts of stoker up, any number of them, are compared with the first one.
    """
    from stoker.bench.document import compared, load
    from stoker.check.document import is_check
    from stoker.cli.bench import write

    checks = [path for path in files if is_check(path)]
    if checks:
        if len(checks) < len(files):
            other = next(path for path in files if path not in checks)
            raise BenchError(f"{checks[0]} is a result of stoker check and {other} is none; compare like with like")
        if csv or markdown:
            raise BenchError("checks are shown as a table, with --html or with --json; other forms are of benchmarks")
        check_writable(json_file, html)
        _checks(files, json_file, html)
        return
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


def _checks(files: list[Path], json_file: Path | None, html: Path | None) -> None:
    """One is shown, the second of two is held against the first; more are shown over time."""
    from stoker.check.document import compared, load
    from stoker.cli.check import write
    from stoker.report.check_series import Series, html_series, print_series

    found = [load(path) for path in files]
    if len(found) < 3:
        write(compared(*found) if len(found) == 2 else found[0], json_file, html, error_console())
        return
    names = [path.stem for path in files]
    series = Series(names if len(set(names)) == len(names) else list(map(str, files)), found)
    to_stdout = str(json_file) == "-"
    console = error_console() if to_stdout else output_console()
    print_series(series, console)
    written = {html: html_series(series), json_file: json.dumps(series.as_json(), indent=2) + "\n"}
    for path, text in written.items():
        if path is not None and str(path) != "-":
            path.write_text(text, encoding="utf-8")
            console.print(f"wrote {path}", markup=False)
    if to_stdout:
        typer.echo(written[json_file], nl=False)


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
