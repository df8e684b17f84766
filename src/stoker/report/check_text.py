"""A check's result as text: tables in the terminal, and the cells that the HTML page shows too."""

from typing import TYPE_CHECKING

from stoker.check.record import Closeness, Document, Row, Sanity

if TYPE_CHECKING:
    from rich.console import Console

HEADS = ("suite", "items", "score", "95 %", "other", "difference", "95 %", "p", "verdict")
ALONE = HEADS[:4]
CLOSE_HEADS = ("text", "positions", "KL, nats a token", "95 %", "same top token", "not itemised", "verdict")
COLOURS = {"worse": "red", "better": "green"}


def print_check(found: Document, console: "Console") -> None:
    from rich import box
    from rich.table import Table

    for server in found.environment.servers:
        line = f"{server.name}: {server.model} at {server.url} ({server.engine}); prompts fitted by {server.tokenizer}"
        console.print(line, style="dim", markup=False, soft_wrap=True)
    two = len(found.environment.servers) == 2
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in HEADS if two else ALONE:
        left = head in ("suite", "verdict")
        table.add_column(head, justify="left" if left else "right", no_wrap=True)
    for row in found.suites:
        table.add_row(*cells(row, two), style=COLOURS.get(row.verdict))
    if found.suites:
        console.print(table)
    if found.closeness:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title="A's predictions against B's")
        for head in CLOSE_HEADS:
            table.add_column(head, justify="left" if head in ("text", "verdict") else "right", no_wrap=True)
        for near in found.closeness:
            table.add_row(*close_cells(near), style=COLOURS.get(near.verdict))
        console.print(table)
    for each in found.sanity:
        style = "yellow" if each.concern else "dim"
        console.print(sanity_line(each), style=style, markup=False, soft_wrap=True)
    for line in (*spent(found), *needed(found)):
        console.print(line, style="dim", markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(f"warning: {note}", style="yellow", markup=False, soft_wrap=True)
    for line in failures(found):
        console.print(f"failed: {line}", style="red", markup=False, soft_wrap=True)
    console.print(found.statement, style="bold", markup=False, soft_wrap=True)


def cells(row: Row, two: bool) -> tuple[str, ...]:
    name = f"{row.name}, parts" if row.measure == "parts" else row.name
    items = f"{row.items}" if not row.failed else f"{row.items} of {row.items + row.failed}"
    alone = (name, items, f"{row.score:.1%}", f"{row.low:.1%} … {row.high:.1%}")
    if not two or row.difference is None:
        return alone
    interval = f"{(row.difference_low or 0) * 100:+.1f} … {(row.difference_high or 0) * 100:+.1f}"
    return (
        *alone,
        f"{row.other or 0:.1%}",
        f"{row.difference * 100:+.1f}",
        interval,
        p_value(row.p),
        row.verdict,
    )


def p_value(p: float | None) -> str:
    return "–" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def close_cells(row: Closeness) -> tuple[str, ...]:
    interval = f"{row.low:.4f} … {row.high:.4f}"
    return (row.kind, f"{row.tokens:,}", f"{row.kl:.4f}", interval, f"{row.top1:.1%}", f"{row.rest:.2%}", row.verdict)


def sanity_line(each: Sanity) -> str:
    counted = ", ".join(f"{each.counts[server]} of {each.of[server]} on {server}" for server in each.counts)
    return f"{each.name}: {counted}" + (f" ({each.note})" if each.note else "")


def spent(found: Document) -> list[str]:
    counted = ", ".join(f"{tokens:,} of {server}" for server, tokens in found.output_tokens.items())
    return [f"Output tokens: {counted}. Thinking: {found.thinking}. Seed: {found.seed}."]


def needed(found: Document) -> list[str]:
    """How many items other differences would need, for the suite with most items."""
    rows = [row for row in found.suites if row.items_needed]
    if not rows:
        return []
    row = max(rows, key=lambda each: each.items)
    told = ", ".join(f"{points} points {items:,}" for points, items in row.items_needed.items())
    return [f"Items that find a difference four times in five, judging by {row.name}: {told} (--items)."]


def failures(found: Document) -> list[str]:
    return [
        f"{server}: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}"
        for server, kinds in found.failures.items()
        if kinds
    ]
