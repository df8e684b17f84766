"""`stoker plan MODEL --boxes` in a terminal."""

import textwrap
from collections.abc import Sequence

from stoker.plan.catalog import GIB
from stoker.plan.which_box import Line
from stoker.report.columns import columns

NARROW = 76  # characters below which the recipe's column goes


def table(lines: Sequence[Line], width: int) -> list[str]:
    first = lines[0].answer
    ask = first.ask
    users = "1 user" if ask.users == 1 else f"{ask.users} users"
    found = [f"{first.model.name}: which box? {users} x {ask.context:,} tokens, {first.question.workload} text"]
    wide = width >= NARROW
    heads, right = (HEADS, (2, 3)) if wide else ((HEADS[0], *HEADS[2:]), (1, 2))
    found += columns(heads, [_cells(line, wide) for line in lines], width, right)
    sources: dict[str, list[str]] = {}
    for box in (line.answer.box for line in lines):
        if box.price_usd:
            sources.setdefault(box.price_source, []).append(box.key)
    prices = [f"{', '.join(keys)}: {source}" for source, keys in sources.items()]
    said = [
        "≈ predicted, with its range. Measured: the nearest published run there, tok/s and grade.",
        "Of each box its best recipe by speed; a faster one may differ in format, and so in quality.",
        f"Prices: {'; '.join(prices)}. Blank: nobody was found who states one." if prices else "",
    ]
    for text in said:
        found += textwrap.wrap(text, width, break_on_hyphens=False)
    return found


HEADS = ("box", "recipe", "≈ tok/s", "price $", "measured")


def _cells(line: Line, wide: bool) -> tuple[str, ...]:
    a, s = line.answer, line.answer.speed
    recipe = f"{a.weights_key}{f' {a.ask.draft}' if a.ask.draft.drafting else ''}, {a.ask.engine}"
    speed = (
        f"{s.tokens_per_s:.0f} ({s.low:.0f}-{s.high:.0f})" if a.fits else f"{-a.budget.free_bytes / GIB:.0f} GiB short"
    )
    price = f"{a.box.price_usd:,.0f}" if a.box.price_usd else ""
    measured = "-"
    for row in line.evidence[:1]:
        drafter = row.drafter if row.drafter != "none" else row.weights
        measured = f"{row.decode_tok_s:g} {row.evidence}" + (f", {drafter}" if wide and drafter else "")
    cells = (a.box.key, recipe, speed, price, measured)
    return cells if wide else (cells[0], *cells[2:])
