"""What a recipe promises beside what was measured and what the planner predicts, and whether the promise is kept."""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from stoker.plan.catalog import GIB
from stoker.recipes.recipe import Recipe
from stoker.up.measure import Measured
from stoker.up.planning import Planned

# Of a promise: runs on one box differ by 6 to 7 %, and starts by what the disk does beside.
SPEED, STEPS, MEMORY, START = 0.90, 0.90, 1.10, 1.25


class Compared(Struct, frozen=True):
    """One line of the comparison. `kept` is None where nothing was promised for this box, or nothing measured."""

    what: str
    unit: str
    promised: float | None
    measured: float | None
    kept: bool | None
    source: str = ""  # of the promise
    predicted: float | None = None
    predicted_low: float | None = None
    predicted_high: float | None = None


def compare(
    recipe: Recipe,
    rows: Sequence[Measured],
    start_s: float,
    memory_bytes: int,
    planned: Planned | None,
    comparable: bool,
) -> list[Compared]:
    """`comparable`: this is the box that the promise is about."""
    found = [*_speeds(recipe, rows, planned, comparable)]
    for what, unit, amount, value, most in (
        ("memory", "GiB", recipe.expected.memory_gib, round(memory_bytes / GIB, 2) or None, MEMORY),
        ("start", "s", recipe.expected.start_s, round(start_s, 1) or None, START),
    ):
        limit = planned.memory_bytes / GIB if what == "memory" and planned and planned.memory_bytes else None
        if amount is None and value is None:
            continue
        kept = value <= most * amount.value if amount and value and comparable else None
        predicted = None if limit is None else round(limit, 2)
        source = amount.source if amount else ""
        found.append(Compared(what, unit, amount.value if amount else None, value, kept, source, predicted))
    return found


def _speeds(recipe: Recipe, rows: Sequence[Measured], planned: Planned | None, comparable: bool) -> Iterator[Compared]:
    by_name = {(row.workload, row.users): row for row in rows}
    promised = set()
    for speed in recipe.expected.speed:
        row = by_name.get((speed.workload, speed.users))
        end_to_end = speed.timing == "end-to-end"
        value = None if row is None else (row.end_to_end_tokens_per_s if end_to_end else row.decode_tokens_per_s)
        if not end_to_end:
            promised.add((speed.workload, speed.users))
        name = _name(speed.workload, speed.users) + (", end to end" if end_to_end else "")
        kept = value >= SPEED * speed.tokens_per_s if value is not None and comparable else None
        if comparable and value is None and row and row.failed:
            kept = False  # whoever asks gets no answer
        yield _line(name, speed.tokens_per_s, value, kept, speed.source, planned, speed.workload, speed.users)
        if speed.tokens_per_step is not None:
            steps = row.tokens_per_step if row else None
            good = steps >= STEPS * speed.tokens_per_step if steps is not None and comparable else None
            yield Compared(f"{name}, per step", "tokens", speed.tokens_per_step, steps, good, speed.source)
    for row in rows:
        if (row.workload, row.users) not in promised:
            name = _name(row.workload, row.users)
            yield _line(name, None, row.decode_tokens_per_s, None, "", planned, row.workload, row.users)


def _line(
    what: str,
    promised: float | None,
    measured: float | None,
    kept: bool | None,
    source: str,
    planned: Planned | None,
    workload: str,
    users: int,
) -> Compared:
    speed = planned.predict(workload, users) if planned else None
    if speed is None:
        return Compared(what, "tokens/s", promised, measured, kept, source)
    predicted = [round(value / users, 1) for value in (speed.tokens_per_s, speed.low, speed.high)]
    return Compared(what, "tokens/s", promised, measured, kept, source, *predicted)


def _name(workload: str, users: int) -> str:
    return workload if users == 1 else f"{workload}, {users} users, each"


def verdict(lines: Sequence[Compared]) -> bool | None:
    """Whether every promise that could be checked was kept; None if there was none."""
    checked = [line.kept for line in lines if line.kept is not None]
    return all(checked) if checked else None
