"""Receipts of `stoker up` side by side: what they have in common, and what changed from the first to each other."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.up.receipt import Receipt

if TYPE_CHECKING:
    from rich.table import Table

GIB = 1 << 30
NOISE = 0.07  # runs on one box differ by as much


def facts(receipt: Receipt) -> dict[str, str]:
    """What says whether two runs can be compared at all."""
    recipe, probe = receipt.recipe, receipt.probe
    speeds = probe.speeds if probe else ()
    return {
        "recipe": f"{recipe.name} ({recipe.hash[:8]})",
        "date": receipt.date,
        "engine": f"{recipe.engine} {receipt.versions.get(recipe.engine, '')}".strip(),
        "files": ", ".join(f"{each.source}@{each.revision[:12]}".rstrip("@") for each in receipt.revisions),
        "box": receipt.box or (probe.processor.name if probe else ""),
        "reads weights at": f"{speeds[0].gemv_gb_s:.0f} GB/s" if speeds else "not measured",
        "greedy answer": receipt.greedy_sha256[:12],
        "promise": {True: "kept", False: "not kept", None: "none for this box"}[receipt.kept],
    }


def figures(receipt: Receipt) -> dict[str, tuple[float, str]]:
    """Numbers by name, with their units."""
    found: dict[str, tuple[float, str]] = {}
    for row in receipt.measured:
        name = row.workload if row.users == 1 else f"{row.workload}, {row.users} users, each"
        for value, what, unit in (
            (row.decode_tokens_per_s, name, "tokens/s"),
            (row.tokens_per_step, f"{name}, per step", "tokens"),
            (row.first_token_s, f"{name}, first token", "s"),
        ):
            if value is not None:
                found[what] = (value, unit)
    found["start"] = (receipt.start_s, "s")
    if receipt.memory_bytes:
        found["memory"] = (round(receipt.memory_bytes / GIB, 2), "GiB")
    return found


def compared(receipts: Sequence[Receipt]) -> dict[str, Any]:
    """As JSON: facts and figures of each, and changes against the first."""
    first = figures(receipts[0])
    rows = []
    for name in dict.fromkeys(name for each in receipts for name in figures(each)):
        values = [figures(each).get(name, (None, ""))[0] for each in receipts]
        unit = next(figures(each)[name][1] for each in receipts if name in figures(each))
        base = first.get(name, (None, ""))[0]
        changes = [round(value / base - 1, 4) if value is not None and base else None for value in values]
        rows.append({"name": name, "unit": unit, "values": values, "changes": changes})
    hashes = {each.greedy_sha256 for each in receipts}
    return {
        "facts": [facts(each) for each in receipts],
        "figures": rows,
        "same_recipe": len({each.recipe.hash for each in receipts}) == 1,
        "same_files": len({each.revisions for each in receipts}) == 1,
        "same_greedy_answer": len(hashes) == 1 if len(receipts) > 1 else None,
    }


def table(paths: Sequence[Path], receipts: Sequence[Receipt]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    found = compared(receipts)
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    shown.add_column("")
    for path in paths:
        shown.add_column(path.name, overflow="fold")
    for name in found["facts"][0]:
        shown.add_row(name, *(each[name] for each in found["facts"]))
    shown.add_section()
    for row in found["figures"]:
        shown.add_row(f"{row['name']}, {row['unit']}", *_cells(row))
    return shown


def _cells(row: dict[str, Any]) -> Iterator[str]:
    for place, (value, change) in enumerate(zip(row["values"], row["changes"], strict=True)):
        if value is None:
            yield "–"
        elif place and change is not None:
            yield f"{value:.4g} ({change:+.0%}{', noise' if 0 < abs(change) < NOISE else ''})"
        else:
            yield f"{value:.4g}"


def remarks(receipts: Sequence[Receipt]) -> Iterator[str]:
    """What a reader of the table should know."""
    found = compared(receipts)
    if len(receipts) < 2:
        return
    if not found["same_recipe"]:
        yield "The recipes are not the same."
    if not found["same_files"]:
        yield "The files are not the same."
    same_engine = len({facts(each)["engine"] for each in receipts}) == 1
    if found["same_greedy_answer"]:
        yield "The fixed greedy answer is the same, token for token."
    elif found["same_files"] and same_engine:
        yield "The fixed greedy answer differs although files and engine are the same: look into that before speeds."
    else:
        yield "The fixed greedy answer differs."
