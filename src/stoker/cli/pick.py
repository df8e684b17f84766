"""`stoker pick`: which models suit this box."""

import json
from typing import Annotated

import typer

from stoker.cli.progress import output_console


def pick(
    box: Annotated[
        str, typer.Option("--box", help="spark, 2xspark, strix-halo, rtx-5090, h200, ..., or this.")
    ] = "this",
    need: Annotated[str, typer.Option("--need", help="agent, chat, batch or long-context.")] = "agent",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
) -> None:
    """Rank the models that fit a box for a need, with evidence, and say what does not fit and by how much."""
    from stoker.plan.pick import pick as choose

    found, wanted, choices = choose(box, need)
    if as_json:
        document = {
            "box": found.key,
            "need": wanted.name,
            "need_is": {"context": wanted.context, "users": wanted.users, "tokens_per_s": wanted.least},
            "rows": [choice.to_json() for choice in choices],
        }
        typer.echo(json.dumps(document, indent=2))
        return
    from rich import box as borders
    from rich.table import Table

    console = output_console()
    console.print(f"{found.name}, for {wanted.title}", style="bold", markup=False)
    table = Table(box=borders.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "model", "recipe", "≈ tok/s", "GiB left", "measured here"):
        right = name in ("≈ tok/s", "GiB left")
        table.add_column(
            name, justify="right" if right else "left", overflow="fold", no_wrap=not name.startswith("meas")
        )
    for choice in choices:
        mark = "[green]✓[/]" if choice.meets else "[yellow]~[/]" if choice.fits else "[red]✗[/]"
        s = choice.speed
        speed = f"{s.tokens_per_s:.0f} ({s.low:.0f}–{s.high:.0f})" if choice.fits else "–"
        rows = [
            f"{row.decode_tok_s:g} {row.drafter if row.drafter != 'none' else row.weights}" for row in choice.evidence
        ]
        short = "*" if choice.context < wanted.context else ""
        left = f"{choice.budget.free_bytes / (1 << 30):.1f}".replace("-", "−")
        shown = ", ".join(rows[: 2 if console.width >= 100 else 1]) if choice.fits and rows else "–"
        table.add_row(mark, choice.model.name + short, choice.recipe, speed, left, shown)
    console.print(table)
    legend = (
        f"✓ fits and meets {wanted.least:g} tok/s predicted at {wanted.users} x {wanted.context:,} tokens, larger "
        "models first (speed is no measure of quality); ~ fits; ✗ does not fit. By whom: stoker evidence MODEL."
    )
    console.print(legend, style="dim")
    if any(choice.context < wanted.context for choice in choices):
        console.print("* The model has fewer positions than the need asks for; planned with those it has.", style="dim")
    if any(choice.assumed for choice in choices if choice.fits):
        console.print("Where a recipe drafts, acceptance is assumed from published runs of the 122B.", style="dim")
