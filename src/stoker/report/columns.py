"""Tables in plain text that keep every column that matters in a narrow terminal: the last column gives way."""

from collections.abc import Sequence

GAP = 2


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int, right: Sequence[int] = ()) -> list[str]:
    """`right`: columns whose cells end alike. The last column is cut where the terminal ends."""
    table = [list(heads), *(list(row) for row in rows)]
    sizes = [max(len(row[i]) for row in table) for i in range(len(heads))]
    room = width - sum(sizes[:-1]) - GAP * (len(heads) - 1)
    sizes[-1] = max(8, min(sizes[-1], room))
    found = []
    for row in table:
        cells = [_cut(cell, size) for cell, size in zip(row, sizes, strict=True)]
        cells = [c.rjust(s) if i in right else c.ljust(s) for i, (c, s) in enumerate(zip(cells, sizes, strict=True))]
        found.append((" " * GAP).join(cells).rstrip())
    return found


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(0, room - 1)] + "…"
