"""Measurements as rows: what was run where, by whom, and whether it is decode-only or end-to-end.

data/measurements.csv is the table of what others published; docs/plan.md documents its columns. The user's own rows,
out of receipts, are kept apart from it and never fitted. A measured number is never called a prediction.
"""

import csv
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from stoker.errors import RequestError
from stoker.plan.catalog import DATA

OWN = "measured here"  # the source of the user's own rows

# Posts and repositories of one author about the same runs: one source where sources are held out.
SAME_SOURCE = {
    "document 003": "albond/DGX_Spark_Qwen3.5-122B-A10B-AR-INT4",
    "document 000": "Entrpi/qwen3.5-122B-A10B-on-spark",
    "MiaAI-Lab/Qwen3.8-Flash-Next-Single-DGX-Spark": "MiaAI-Lab",
    "MiaAI-Lab/Qwen3.8-Flash-Next-Single-DGX-Spark-TensorFold": "MiaAI-Lab",
    "MiaAI-Lab/Qwen3.8-27B-DGX-Spark-TensorFold": "MiaAI-Lab",
}
PROSE, CODE, AGENT, COUNTING, MIXED = "prose", "code", "agent", "counting", "mixed"
# words of a workload's name -> kind of text; the first that matches counts
_KINDS = (
    (COUNTING, r"counting"),  # the easiest text there is; a show of what a drafter can reach
    (AGENT, r"agent|tool|json|kie|structured"),
    (CODE, r"code|humaneval|coding"),
    (PROSE, r"prose|q&a|hungarian|chat|text|rag|think|ifeval|mmlu|random"),
)


@dataclass(frozen=True)
class Row:
    id: str
    model: str
    parameters_b: float | None
    active_b: float | None
    weights_stated: str
    weights: str  # the planner's name for them; empty: not one it can count
    kv: str
    box: str
    boxes: int
    engine: str
    backend: str
    engine_version: str
    drafter: str
    depth: int | None  # None: not stated
    workload: str
    context_tokens: int | None
    output_tokens: int | None
    users: int
    prefill_tok_s: float | None
    decode_tok_s: float | None
    scope: str  # per_stream or aggregate
    timing: str  # decode-only, end-to-end or unstated
    acceptance_rate: float | None
    tokens_per_step: float | None  # accepted drafts + 1; None: not stated
    method: str
    evidence: str  # A: a table or log of the run, B: a figure in a post, C: hearsay or crowd-submitted
    notes: str
    source: str
    url: str
    date: str
    fresh_tokens: int | None = None  # of each prompt, where the rest of it was cached; None: all of it

    @property
    def held_out_with(self) -> str:
        return SAME_SOURCE.get(self.source, self.source)

    @property
    def kind(self) -> str:
        """Prose, code or agent text, by the workload's name; mixed where it does not say."""
        return kind_of(self.workload)

    @property
    def own(self) -> bool:
        """Measured by the user, not published."""
        return self.source == OWN

    @property
    def link(self) -> str:
        return f"{self.url}, {self.source}" if self.source.startswith("document") else self.url

    @property
    def recipe(self) -> str:
        """Format, drafter and engine in a few words; of its version what comes before a build's hash or remarks."""
        draft = "" if self.drafter == "none" else f" + {self.drafter}"
        depth = f"-{self.depth}" if draft and self.depth else ""
        version = re.split(r"[+(]", self.engine_version)[0].strip()
        return f"{self.weights_stated or 'weights not stated'}{draft}{depth}, {self.engine} {version}".strip()

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id, "model": self.model, "weights": self.weights_stated, "box": self.box, "boxes": self.boxes,
            "engine": f"{self.engine} {self.engine_version}".strip(), "drafter": self.drafter, "depth": self.depth,
            "workload": self.workload, "context_tokens": self.context_tokens, "users": self.users,
            "tokens_per_s": self.decode_tok_s, "prefill_tokens_per_s": self.prefill_tok_s, "scope": self.scope,
            "timing": self.timing, "tokens_per_step": self.tokens_per_step, "grade": self.evidence,
            "notes": self.notes, "source": self.link, "date": self.date,
        }  # fmt: skip


def kind_of(workload: str) -> str:
    text = workload.lower()
    return next((kind for kind, pattern in _KINDS if re.search(pattern, text)), MIXED)


@cache
def _table() -> tuple[list[str], list[list[str]]]:
    """The columns' names, and the lines as they are written."""
    with (DATA / "measurements.csv").open(encoding="utf-8", newline="") as file:
        columns, *lines = csv.reader(file)
    return columns, lines


def _row(columns: list[str], line: list[str]) -> Row:
    values: dict[str, Any] = dict(zip(columns, line, strict=True))
    for name in ("boxes", "depth", "context_tokens", "output_tokens", "users", "fresh_tokens"):
        values[name] = int(values[name]) if values.get(name) else None
    for name in ("parameters_b", "active_b", "prefill_tok_s", "decode_tok_s", "acceptance_rate", "tokens_per_step"):
        values[name] = float(values[name]) if values[name] else None
    return Row(**values)


@cache
def measurements() -> tuple[Row, ...]:
    columns, lines = _table()
    return tuple(_row(columns, line) for line in lines)


def of_model(name: str) -> tuple[Row, ...]:
    """Published rows, and the user's own."""
    return (*_published(name.lower()), *(row for row in own_rows() if row.model.lower() == name.lower()))


def of_models(names: Sequence[str]) -> tuple[Row, ...]:
    """Rows of several names of one model, in lower case."""
    wanted = set(names)
    published = [row for name in names for row in _published(name)]
    return (*published, *(row for row in own_rows() if row.model.lower() in wanted))


@cache
def _published(name: str) -> tuple[Row, ...]:
    """Only these lines become rows: a plan wants one model's."""
    columns, lines = _table()
    model = columns.index("model")
    return tuple(_row(columns, line) for line in lines if line[model].lower() == name)


def own_file() -> Path:
    """Where the user's own rows lie, with the same columns."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "stoker" / "evidence.csv"


def own_rows() -> tuple[Row, ...]:
    try:
        with own_file().open(encoding="utf-8", newline="") as file:
            columns, *lines = csv.reader(file)
        return tuple(_row(columns, line) for line in lines)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError) as error:
        raise RequestError(
            f"{own_file()}, the file of your own measurements, cannot be read ({error}); repair or remove it."
        ) from error


def add_own(rows: Sequence[Row]) -> int:
    """Writes rows that are not there yet; how many these were."""
    before = own_rows()
    known = {row.id for row in before}
    new = [row for row in rows if row.id not in known]
    if new:
        file = own_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(".new")
        with written.open("w", encoding="utf-8", newline="") as out:
            writer = csv.writer(out)
            columns, _ = _table()
            writer.writerow(columns)
            writer.writerows([getattr(row, column) for column in columns] for row in (*before, *new))  # None is empty
        written.replace(file)
    return len(new)


def day(date: str) -> float:
    """So that later is more."""
    digits = re.sub(r"\D", "", date)
    return float(digits.ljust(8, "0")) if digits else 0.0
