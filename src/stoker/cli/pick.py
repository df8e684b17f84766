"""`stoker pick`: which models suit this box, or several boxes side by side."""

import json
import textwrap
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from stoker.plan.catalog import Box
    from stoker.plan.pick import Choice, Need

WIDE = 76  # characters from which there is room for every column


def pick(
    box: Annotated[
        list[str] | None,
        typer.Option(
            "--box", help="spark, '2x spark', 5090, mem=128GB,bw=273GB/s, ..., or this; several are compared."
        ),
    ] = None,
    need: Annotated[str, typer.Option("--need", help="agent, chat, batch or long-context.")] = "agent",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
) -> None:
    """Rank the models that fit a box for a need, with evidence, and say what does not fit and by how much. All are
    compared at the same context, users and text."""
    from stoker.plan.pick import pick as choose

    found = [choose(name, need) for name in box or ["this"]]
    wanted = found[0][1]
    if as_json:
        document: dict[str, Any] = {
            "box": found[0][0].key,
            "need": wanted.name,
            "need_is": {"context": wanted.context, "users": wanted.users, "tokens_per_s": wanted.least},
            "rows": [{**choice.to_json(), "box": at.key} for at, _, choices in found for choice in choices],
        }
        typer.echo(json.dumps(document, indent=2))
        return
    width = get_terminal_size((100, 40)).columns
    lines = (
        _one(*found[0], width) if len(found) == 1 else _several([(at, rows) for at, _, rows in found], wanted, width)
    )
    print("\n".join(lines))


def _one(box: "Box", need: "Need", choices: "tuple[Choice, ...]", width: int) -> list[str]:
    from stoker.report.columns import columns

    wide = width >= WIDE
    rows = []
    for choice in choices:
        measured = [
            f"{row.decode_tok_s:g} {row.drafter if row.drafter != 'none' else row.weights}" for row in choice.evidence
        ]
        left = f"{choice.budget.free_bytes / (1 << 30):.1f}"
        speed = _speed(choice) if choice.fits else f"{left} GiB"
        cells = (_name(choice, need), choice.recipe, speed, left, ", ".join(measured[:2]) or "-")
        rows.append(cells if wide else (cells[0], cells[1], cells[2], measured[0].split()[0] if measured else "-"))
    heads = ("model", "recipe", "≈ tok/s", *(("GiB left",) if wide else ()), "measured")
    table = columns(heads, rows, width, right=(2, 3) if wide else (2,))
    return [*textwrap.wrap(f"{box.name}, for {need.title}", width), *table, *_legend(need, list(choices), width)]


def _several(found: "list[tuple[Box, tuple[Choice, ...]]]", need: "Need", width: int) -> list[str]:
    """Models down, boxes across."""
    from stoker.report.columns import columns

    by_box = [{choice.model.name: choice for choice in choices} for _, choices in found]
    names = list(dict.fromkeys(choice.model.name for _, choices in found for choice in choices))
    rows = []
    for name in names:
        cells = [_cell(at.get(name)) for at in by_box]
        rows.append((name, *cells))
    heads = ("≈ tok/s", *(box.key for box, _ in found))
    return [
        f"For {need.title}",
        *columns(heads, rows, width, right=tuple(range(1, len(heads)))),
        *_legend(need, [choice for _, choices in found for choice in choices], width),
        *textwrap.wrap("Of each model the fastest recipe of that box; +: meets the need.", width),
    ]


def _cell(choice: "Choice | None") -> str:
    if choice is None:
        return "-"
    if not choice.fits:
        return f"{choice.budget.free_bytes / (1 << 30):.0f} GiB"
    return f"{'+' if choice.meets else ''}{_speed(choice)}"


def _speed(choice: "Choice") -> str:
    s = choice.speed
    return f"{s.tokens_per_s:.0f} ({s.low:.0f}-{s.high:.0f})"


def _name(choice: "Choice", need: "Need") -> str:
    mark = "+" if choice.meets else "~" if choice.fits else "x"
    return f"{mark} {choice.model.name}{'*' if choice.context < need.context else ''}"


def _legend(need: "Need", choices: "list[Choice]", width: int) -> list[str]:
    said = [
        f"+ fits and meets {need.least:g} tok/s predicted at {need.users} x {need.context:,} tokens, larger models "
        "first (speed is no measure of quality); ~ fits; x does not, and lacks so many GiB. Sources: "
        "stoker evidence MODEL."
    ]
    if any(choice.context < need.context for choice in choices):
        said.append("* The model has fewer positions than the need asks for; planned with those it has.")
    if any(choice.assumed for choice in choices if choice.fits):
        said.append("Where a recipe drafts, acceptance is assumed from published runs of the 122B.")
    return [line for text in said for line in textwrap.wrap(text, width, break_on_hyphens=False)]
