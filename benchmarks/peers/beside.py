"""Recorded results of Stoker and of another engine side by side: rows of the same measurement and their ratio."""

import json
from pathlib import Path
from typing import Any

DECODE = ("shape", "weights", "batch", "draft", "context", "kv")
PREFILL = ("shape", "weights", "tokens", "context", "kv")


def print_beside(paths: list[str], theirs: dict[str, Any]) -> None:
    """`paths`: results of gpu/decode.py and gpu/prefill.py; `theirs`: one of a script in this folder."""
    ours = [json.loads(Path(path).read_text()) for path in paths]
    if other := [result["device"] for result in ours if result["device"] != theirs["device"]]:
        print(f"Not the same device: {', '.join(other)} beside {theirs['device']}.")
    print(f"| measurement | Stoker, tokens/s | {theirs['engine']}, tokens/s | ratio | |\n|---|---|---|---|---|")
    for line in compare([row for result in ours for row in result["rows"]], theirs["rows"] + theirs["prefill"]):
        print(line)


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[str]:
    """A table line for each of their rows; without one of ours it says so."""
    known = {_key(row): row for row in ours}
    return [_line(known.get(_key(row)), row) for row in theirs]


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in (PREFILL if "tokens" in row else DECODE))


def _line(mine: dict[str, Any] | None, row: dict[str, Any]) -> str:
    if "tokens" in row:
        what = f"{row['shape']} {row['weights']}, prefill of {row['tokens']:,}"
    else:
        what = f"{row['shape']} {row['weights']}, batch {row['batch']}, {row['draft']}, context {row['context']:,}"
    speed = f"{row['tokens_per_s']:,.1f}"
    if mine is None:
        return f"| {what} | – | {speed} | – | no such row of Stoker's |"
    notes = [f"{name} does not count" for name, one in (("Stoker's", mine), ("the other's", row)) if not _counts(one)]
    lengths = mine.get("accept_length", 1.0), row.get("accept_length", 1.0)
    if abs(lengths[0] / lengths[1] - 1.0) > 0.02:
        notes.append(f"{lengths[0]:.2f} against {lengths[1]:.2f} tokens a step")
    ratio = mine["tokens_per_s"] / row["tokens_per_s"]
    return f"| {what} | {mine['tokens_per_s']:,.1f} | {speed} | {ratio:.2f} | {'; '.join(notes)} |"


def _counts(row: dict[str, Any]) -> bool:
    return bool(row.get("counts", True))
