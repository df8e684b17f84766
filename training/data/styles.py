"""Line and table styles put together at random, so that no style can be relied on. Those of invoice_parts.HELD_LINES
and HELD_ROWS (square brackets, ">>", stars; braces, "::") cannot come out."""

import random

from training.data.invoice_parts import LineStyle, RowStyle

BULLETS = ["", "", "", "", "- ", "> ", "+ ", "· ", "o ", "~ "]
AROUND = [("", "")] * 5 + [("(", ")"), ("<", ">"), ('"', '"'), ("_", "_"), ("'", "'")]
BETWEEN = [
    ": ",
    ": ",
    " = ",
    " - ",
    " | ",
    "\t",
    " ~ ",
    " -> ",
    " := ",
    ":\n",
    "\n    ",
    " ... ",
    "; ",
    " / ",
    ":",
    "=",
]
BETWEEN_CELLS = [", ", " | ", ";", "\t", " - ", " / ", " ~ ", "  ", " + "]


def line_style(rng: random.Random) -> LineStyle:
    bullet, (before, after), between = rng.choice(BULLETS), rng.choice(AROUND), rng.choice(BETWEEN)
    if rng.random() < 0.08:  # the value first
        return lambda label, value: f"{bullet}{value} ({label})"
    return lambda label, value: f"{bullet}{before}{label}{after}{between}{value}"


def row_style(rng: random.Random) -> RowStyle:
    """Price and amount keep their order: they look alike."""
    between, (before, after) = rng.choice(BETWEEN_CELLS), rng.choice(AROUND)
    bullet, times, equals = rng.choice(BULLETS), rng.choice(["", "", "x", " pcs"]), rng.choice(["", "", "= "])
    numbered, quantity_first = rng.random() < 0.2, rng.random() < 0.3

    def row(place: int, description: str, quantity: str, price: str, amount: str) -> str:
        named, counted = f"{before}{description}{after}", f"{quantity}{times}"
        cells = [counted, named] if quantity_first else [named, counted]
        number = f"{place}. " if numbered else bullet
        return number + between.join([*cells, price, f"{equals}{amount}"])

    return row
