"""Checks over time: scores of several results beside each other, and each held against the first, item by item."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from stoker.check.document import compared
from stoker.check.record import Document, Row
from stoker.report import charts, check_text
from stoker.report.charts import Chart
from stoker.report.check import changed
from stoker.report.page import render

if TYPE_CHECKING:
    from rich.console import Console


class Series:
    """`names` are those of the files, the first of which is what the others are compared with."""

    def __init__(self, names: Sequence[str], found: Sequence[Document]) -> None:
        self.names, self.found = list(names), list(found)
        self.changes = [None, *(compared(found[0], each) for each in found[1:])]
        every = [each for each in (*found, *self.changes) if each]
        self.suites = list(dict.fromkeys((row.name, row.measure) for each in every for row in each.suites))

    @property
    def sentence(self) -> str:
        """What became of the latest, which is what somebody asks first."""
        last = self.changes[-1]
        assert last is not None
        what = f"{self.names[-1]} against {self.names[0]}"
        by = changed(last)
        asked = sum(row.items for row in last.suites if row.measure == "passed")
        said = {
            "worse": f"Answers got worse {by}".strip(),
            "better": f"Answers got better {by}".strip(),
            "no difference found": f"No difference found on {asked:,} questions",
            "undecided": "It cannot be said whether answers got worse",
        }
        return f"{said.get(last.verdict, 'The two have no question in common')}: {what}."

    def heads(self) -> list[str]:
        return ["suite", *self.names]

    def rows(self) -> list[tuple[list[str], str]]:
        """Cells, and the last verdict of each row."""
        found = []
        for name, measure in self.suites:
            cells, verdict = [f"{name}, parts" if measure == "parts" else name], ""
            for place, each in enumerate(self.found):
                row, change = _row(each, name, measure), _row(self.changes[place], name, measure)
                verdict = change.verdict if change else ""
                row = row or change  # all questions together are only compared
                cells.append(f"{row.score:.1%}{_told(change)}" if row else "–")
            found.append((cells, verdict))
        return found

    def facts(self) -> list[tuple[str, list[str]]]:
        """What says whether the checks can be compared at all."""
        servers = [each.environment.servers[0] for each in self.found]
        return [
            ("asked", [each.environment.started.replace("T", " ").partition("+")[0] for each in self.found]),
            ("model", [server.model for server in servers]),
            ("engine", [server.engine for server in servers]),
            ("seed", [each.seed for each in self.found]),
            ("thinking", [each.thinking for each in self.found]),
            ("failed", [str(sum(each.failures.get("A", {}).values())) for each in self.found]),
            ("complete", ["yes" if each.complete else "no" for each in self.found]),
        ]

    def remarks(self) -> list[str]:
        lines = [f"{name}: {change.statement}" for name, change in zip(self.names, self.changes, strict=True) if change]
        return [*lines, "Each check is compared with the first; verdicts are not adjusted for the number of checks."]

    def chart(self) -> tuple[Chart, Chart] | None:
        lines = [
            (name, [(place + 1, row.score * 100) for place, row in enumerate(_rows(self.found, name)) if row])
            for name, measure in self.suites
            if measure == "passed"
        ]
        return charts.both(partial(charts.lines, lines, "check, in the order given", "%")) if lines else None

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": "checks",
            "sentence": self.sentence,
            "files": self.names,
            "facts": dict(self.facts()),
            "suites": [
                {
                    "name": name,
                    "measure": measure,
                    "scores": [row.score if row else None for row in _rows(self.found, name, measure)],
                    "differences": [row.difference if row else None for row in _rows(self.changes, name, measure)],
                    "verdicts": [row.verdict if row else "" for row in _rows(self.changes, name, measure)],
                }
                for name, measure in self.suites
            ],
            "verdicts": [change.verdict if change else "" for change in self.changes],
        }


def print_series(series: Series, console: "Console") -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, head in enumerate(series.heads()):
        table.add_column(head, justify="right" if place else "left", overflow="fold")
    for name, cells in series.facts():
        table.add_row(name, *cells, style="dim")
    table.add_section()
    for line, verdict in series.rows():
        table.add_row(*line, style=check_text.COLOURS.get(verdict))
    console.print(table)
    for remark in series.remarks():
        console.print(remark, style="dim", markup=False, soft_wrap=True)
    console.print(series.sentence, style="bold", markup=False, soft_wrap=True)


def html_series(series: Series) -> str:
    return render("checks.html", series=series, chart=series.chart())


def _rows(found: Sequence[Document | None], name: str, measure: str = "passed") -> list[Row | None]:
    return [_row(each, name, measure) for each in found]


def _row(found: Document | None, name: str, measure: str) -> Row | None:
    rows = found.suites if found else []
    return next((row for row in rows if (row.name, row.measure) == (name, measure)), None)


def _told(change: Row | None) -> str:
    if change is None or change.difference is None:
        return ""
    return f" ({change.difference * 100:+.1f}{f', {change.verdict}' if change.verdict in ('worse', 'better') else ''})"
