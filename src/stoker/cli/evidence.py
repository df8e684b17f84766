"""`stoker evidence`: what others, and the user, measured with a model, with links and dates."""

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.progress import output_console

WIDE = 76  # characters from which there is room for a table with sources

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stoker.plan.evidence import Row


def evidence(
    model: Annotated[str, typer.Argument(help="A model: 122b, Qwen3.6-35B-A3B, gpt-oss-120b, ...")] = "",
    box: Annotated[str | None, typer.Option("--box", help="Only rows of this box.")] = None,
    add: Annotated[
        list[Path] | None,
        typer.Option("--add", metavar="RECEIPT", help="Add what a receipt of stoker up holds to your own rows."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
) -> None:
    """List measurements of a model, published and your own: speed, recipe, workload, how it was timed, and by whom."""
    from stoker.errors import RequestError
    from stoker.plan.catalog import find_box, find_model, suggestion
    from stoker.plan.evidence import measurements, of_model

    for file in add or ():
        _add(file, quiet=as_json)
    if not model:
        if not add:
            _overview(box, as_json)
        return
    rows = of_model(model)
    name = model
    if not rows:
        try:
            name = find_model(model).name
        except RequestError:
            names = {row.model: row.model for row in measurements()}
            raise RequestError(
                f"there are no measurements of {model!r}. {suggestion(model, names)} Rows exist of {len(names)} "
                "models; stoker evidence lists them."
            ) from None
        rows = of_model(name)
    if box:
        wanted = find_box(box).of_rows
        rows = tuple(row for row in rows if (row.box, row.boxes) == wanted)
    if as_json:
        typer.echo(json.dumps({"model": name, "rows": [row.to_json() for row in rows]}, indent=2))
        return
    console = output_console()
    if not rows:
        console.print(f"Nobody published a measurement of {name} there that we know of.", markup=False)
        return
    ordered = sorted(rows, key=lambda row: (row.box, row.boxes, row.users, -(row.decode_tok_s or 0.0)))
    own = sum(row.own for row in rows)
    yours = f", and {own} of your own" if own else ""
    title = f"{len(rows) - own} published measurements of {name}{yours}"
    if console.width < WIDE:
        print("\n".join(_narrow(ordered, title, console.width)))
    else:
        console.print(evidence_table(ordered, title))
    print_links(ordered, console)
    console.print(
        "Grades: A a table or log of the run, B a figure in a post, C hearsay or crowd-submitted.", style="dim"
    )


def _overview(box: str | None, as_json: bool) -> None:
    """What there are measurements of: models, and boxes."""
    from collections import Counter

    from stoker.plan.catalog import find_box
    from stoker.plan.evidence import measurements, own_rows
    from stoker.report.columns import columns

    rows = (*measurements(), *own_rows())
    if box:
        wanted = find_box(box).of_rows
        rows = tuple(row for row in rows if (row.box, row.boxes) == wanted)
    boxes = Counter((row.box, row.boxes) for row in rows)
    of_model: dict[str, list[Row]] = {}
    for row in rows:
        of_model.setdefault(row.model.lower(), []).append(row)
    models = sorted(of_model.values(), key=len, reverse=True)
    if as_json:
        document = {
            "boxes": [{"box": key, "boxes": count, "rows": n} for (key, count), n in boxes.most_common()],
            "models": [
                {"model": group[0].model, "rows": len(group), "boxes": sorted({_box(row) for row in group})}
                for group in models
            ],
        }
        typer.echo(json.dumps(document, indent=2))
        return
    width = get_terminal_size((100, 40)).columns
    lines = [f"{len(rows)} measurements of {len(models)} models. Of one: stoker evidence MODEL [--box BOX].", ""]
    lines += columns(("rows", "box"), [(str(n), _named(*key)) for key, n in boxes.most_common()], width, right=(0,))
    lines.append("")
    found = [
        (str(len(group)), group[0].model, _fastest(group), ", ".join(dict.fromkeys(_box(row) for row in group)))
        for group in models
    ]
    lines += columns(("rows", "model", "tok/s", "boxes"), found, width, right=(0, 2))
    lines += textwrap.wrap("tok/s: the slowest and the fastest of one user, whatever the recipe.", width)
    print("\n".join(lines))


def _fastest(rows: "Sequence[Row]") -> str:
    speeds = [row.decode_tok_s for row in rows if row.users == 1 and row.decode_tok_s]
    return f"{min(speeds):g}-{max(speeds):g}" if len(speeds) > 1 else f"{speeds[0]:g}" if speeds else "-"


def _box(row: "Row") -> str:
    return _named(row.box, row.boxes)


def _named(box: str, count: int) -> str:
    return f"{count}x {box}" if count > 1 else box


def _narrow(rows: "Sequence[Row]", title: str, width: int) -> list[str]:
    """One line for each row: speed, grade, box and users, name, recipe and text as far as there is room."""
    from stoker.report.columns import columns
    from stoker.report.plan_text import place, short

    cells = [
        ("-" if row.decode_tok_s is None else f"{row.decode_tok_s:g}", row.evidence, place(row), row.id,
         f"{short(row)}; {row.workload}")
        for row in rows
    ]  # fmt: skip
    return [
        *textwrap.wrap(title, width),
        *columns(("tok/s", "", "box", "row", "recipe; text"), cells, width, right=(0,)),
    ]


def _add(file: Path, quiet: bool) -> None:
    from stoker.plan.evidence import add_own, own_file
    from stoker.up.evidence import rows_of
    from stoker.up.receipt import read

    rows = rows_of(read(file), str(file.absolute()))
    new = add_own(rows)
    if not quiet:
        said = f"all rows of {file} are there already"
        if new:
            said = f"{new} row{'s' * (new > 1)} of {rows[0].model} added to {own_file()}"
        output_console().print(said, markup=False, soft_wrap=True)


def print_links(rows: "Sequence[Row]", console: "Console") -> None:
    """Where the rows of a table come from, each place once."""
    by_link: dict[str, list[str]] = {}
    for row in rows:
        by_link.setdefault(row.link, []).append(row.id)
    for link, ids in by_link.items():
        said = ", ".join(ids) if len(ids) < 4 else f"{ids[0]} and {len(ids) - 1} more"
        console.print(f"{said}: {link}", style="dim", markup=False, soft_wrap=True)


def evidence_table(rows: "Sequence[Row]", title: str) -> "Table":
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("tok/s", justify="right", no_wrap=True)
    table.add_column("box", no_wrap=True)
    for name in ("recipe", "workload", "timed", "by, when"):
        table.add_column(name, overflow="fold")
    for row in rows:
        count = f"{row.boxes}x " if row.boxes > 1 else ""
        users = f", {row.users} users {'together' if row.scope == 'aggregate' else 'each'}" if row.users > 1 else ""
        at = f" @ {row.context_tokens:,}" if row.context_tokens else ""
        speed = "–" if row.decode_tok_s is None else f"{row.decode_tok_s:g}"
        per_step = f", {row.tokens_per_step:g} per step" if row.drafter != "none" and row.tokens_per_step else ""
        table.add_row(
            speed, f"{count}{row.box}", escape(row.recipe), escape(f"{row.workload}{at}{users}{per_step}"),
            f"{row.timing} ({row.evidence})", f"{escape(row.source.split('/')[0])} {row.date} [dim]{row.id}[/]",
        )  # fmt: skip
    return table
