"""A prediction corrected by what was measured of cases like it, with the range that this leaves.

The miss of a prediction (logarithm of measured over predicted) is taken for a sum of parts that runs share as far as
they are alike (likeness.py), of one that the runs of a source share, and of noise: kriging, or a Gaussian process
with the variances below. They were chosen by how likely they make the misses of every source given all others' rows
(benchmarks/plan/accuracy.py); nothing of a row's own source is used where accuracy is measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt

from stoker.plan.acceptance import MEASURED_WITH
from stoker.plan.cases import Case, cases_of
from stoker.plan.evidence import COUNTING, Row, day
from stoker.plan.likeness import Setting, likeness, same_recipe, setting
from stoker.plan.speed import Fit, fitted

# Variances of the logarithm that runs share where they are alike in ...
MODEL, WEIGHTS, BOX, RECIPE, DRAFTER, COMPANY = 0.0005, 0.0035, 0.006, 0.006, 0.003, 0.02
SOURCE = 0.003  # runs of one model by one source
NOISE = 0.002  # of every run: versions, settings, clocks
DOUBTED = {"A": 0.0, "B": 0.004, "C": 0.016}  # more noise of what is no table or log
ASSUMED = 0.01  # of a speed whose acceptance was assumed
GUESS = {
    "mtp": (0.02, 0.03),
    "dflash": (0.04, 0.12),
}  # of tokens per step: on the model they are published of, on others
OUTLIER, MOST = 0.35, 0.5  # misses beyond are noise of their own, and count no further
NEAREST = 40  # rows that decide
DOUBT_SHOWN = {"A": 0.0, "B": 0.05, "C": 0.15}  # likeness that a row loses where rows are shown
REPEATED = 0.15  # and that a third row of one source loses
SIDE = 1.05  # standard deviations that four in five of held-out rows stay within


@dataclass(frozen=True)
class Known:
    """A measured row, the setting it stands for and what is predicted of it without correction."""

    row: Row
    setting: Setting
    predicted: float  # tokens/s, as the row measures them
    assumed: bool  # its acceptance

    @property
    def measured(self) -> float:
        return self.row.decode_tok_s or 0.0

    @property
    def miss(self) -> float:
        return log(self.measured / self.predicted)

    @property
    def doubt(self) -> float:
        beyond = max(0.0, abs(self.miss) - OUTLIER)
        return NOISE + DOUBTED[self.row.evidence] + (ASSUMED if self.assumed else 0.0) + beyond * beyond

    def of_recipe(self, here: Setting) -> bool:
        """A table or log of the very recipe: the plan's range must hold it. Where the plan's acceptance is told and the
        row's is not, the two are not the same."""
        told = here.guess > 0 or not self.assumed
        return self.row.evidence == "A" and told and same_recipe(here, self.setting)

    def expects(self, uncorrected: float, as_served: bool) -> list[float]:
        """What this row lets expect of a plan of the same recipe: as much more or less than predicted as here and,
        where the row says nothing of its context, the very same. `as_served`: the plan does not say how much of
        several users' prompts is cached, and the row may have it so."""
        found = [uncorrected * self.measured / self.predicted]
        if not self.row.context_tokens or (as_served and self.row.users > 1):
            found.append(self.measured * (self.row.users if self.row.scope == "per_stream" else 1))
        return found


@dataclass(frozen=True)
class Correction:
    """Factors on a predicted speed."""

    factor: float = 1.0
    low: float = 1.0
    high: float = 1.0
    towards: tuple[Row, ...] = ()  # rows of the recipe that the range without correction does not hold


def setting_of(case: Case) -> Setting:
    row = case.row
    return setting(case.model, row.weights, (row.box, row.boxes), row.engine, row.backend, case.draft, row.kind,
                   row.context_tokens, row.users, row.kv,
                   guess_of(case.draft.kind, case.model.name) if case.assumed else 0.0)  # fmt: skip


def guess_of(drafter: str, model: str) -> float:
    """Variance of the logarithm of tokens per step, where what was measured on one model or run is assumed of
    another."""
    own, other = GUESS.get(drafter, (0.0, 0.0))
    return own if model == MEASURED_WITH else other


def known_of(rows: Sequence[Row], fit: Fit | None = None, blind: bool = False) -> tuple[Known, ...]:
    """Those of the rows that can be predicted; `blind` as in `case_of`."""
    fit = fit or fitted()
    return tuple(Known(c.row, setting_of(c), c.predict(fit), c.assumed) for c in cases_of(rows, blind)
                 if not (blind and c.draft.drafting and c.row.kind == COUNTING))  # fmt: skip


class Corrector:
    """The rows nearest to a setting, made ready to correct predictions of it and of others near it."""

    def __init__(self, around: Setting, known: Sequence[Known]) -> None:
        found = [(covariance(around, k.setting), k) for k in known]
        self.known = known
        self.near = [k for c, k in sorted((p for p in found if p[0] > 0), key=lambda p: -p[0])[:NEAREST]]
        matrix = [
            [_between(a, b) + (a.doubt if i == j else 0.0) for j, b in enumerate(self.near[: i + 1])]
            for i, a in enumerate(self.near)
        ]
        self._lower = _cholesky(matrix)
        self._misses = _forward(self._lower, [max(-MOST, min(MOST, k.miss)) for k in self.near])

    def correct(
        self, here: Setting, uncorrected: float, spread: tuple[float, float], unseen: float = 0.0,
        as_served: bool = True,
    ) -> Correction:  # fmt: skip
        """`uncorrected`: predicted tokens/s. `spread`: its log errors that one row in ten is below, and above, without
        correction. `unseen`: what is added on both sides for a box of which there are no rows."""
        across = [covariance(here, k.setting) + self._own(k, here) for k in self.near]
        half = _forward(self._lower, across)
        mean = sum(a * b for a, b in zip(half, self._misses, strict=True))
        variance = covariance(here, here) - sum(a * a for a in half) + SOURCE + NOISE
        side = SIDE * sqrt(max(variance, NOISE)) + unseen
        low, high = exp(mean - side), exp(mean + side)
        recipe = [k for k in self.known if k.of_recipe(here)]
        values = [value / uncorrected for k in recipe for value in k.expects(uncorrected, as_served)]
        low_before, high_before = -spread[1], -spread[0]
        outside = tuple(
            k.row for k in recipe
            if not all(low_before <= log(v / uncorrected) <= high_before for v in k.expects(uncorrected, as_served))
        )  # fmt: skip
        return Correction(exp(mean), min([low, *values]), max([high, *values]), outside)

    @staticmethod
    def _own(k: Known, here: Setting) -> float:
        """Who measured on this box before is the source of the next run too."""
        return SOURCE if k.row.own and k.setting.model == here.model else 0.0


def nearest(rows: Sequence[Row], known: Sequence[Known], here: Setting, limit: int = 5) -> tuple[Row, ...]:
    """Measured rows most like a plan in all of its case; a second opinion says more than the third row of a table."""
    alike = {k.row.id: _share(here, k.setting) for k in known}
    ranked = sorted(
        (-alike.get(row.id, _told(here, row)) + DOUBT_SHOWN[row.evidence], -day(row.date), row.id, row)
        for row in rows if row.decode_tok_s is not None
    )  # fmt: skip
    seen: dict[str, int] = {}
    found = []
    for unlike, date, name, row in ranked:
        before = seen[row.held_out_with] = seen.get(row.held_out_with, -1) + 1
        found.append((unlike + REPEATED * max(0, before - 1), date, name, row))
    return tuple(row for *_, row in sorted(found)[:limit])


def _share(here: Setting, there: Setting) -> float:
    """Of what could be alike, by how much it says about speed."""
    unstated = there.context is None
    like = likeness(here, replace(there, context=here.context) if unstated else there)
    text = here.drafter == "none" or here.kind == there.kind
    users = here.users == there.users
    return (
        0.2 * like.weights
        + (0.3 * like.box + 0.5 * like.recipe) * (0.9 if unstated else 1.0)
        + 0.1 * text
        + 0.3 * users
    )


def _told(here: Setting, row: Row) -> float:
    """Of a row that cannot be predicted: what can be read off it."""
    same = (row.box, row.boxes) == (here.box, here.devices)
    return 0.3 * same + 0.1 * (row.drafter == here.drafter) + 0.3 * (row.users == here.users)


def covariance(a: Setting, b: Setting) -> float:
    like = likeness(a, b)
    return (
        MODEL * like.model + WEIGHTS * like.weights + BOX * like.box + RECIPE * like.recipe
        + DRAFTER * like.drafter + COMPANY * like.company + sqrt(a.guess * b.guess) * like.guess
    )  # fmt: skip


def _between(a: Known, b: Known) -> float:
    shared = SOURCE if a.row.held_out_with == b.row.held_out_with and a.setting.model == b.setting.model else 0.0
    return covariance(a.setting, b.setting) + shared


def _cholesky(matrix: list[list[float]]) -> list[list[float]]:
    """Of the lower triangle of a matrix."""
    lower: list[list[float]] = []
    for row in matrix:
        line: list[float] = []
        for value, other in zip(row[:-1], lower, strict=True):
            line.append((value - sum(map(float.__mul__, line, other))) / other[-1])
        line.append(sqrt(max(row[-1] - sum(x * x for x in line), NOISE / 4)))
        lower.append(line)
    return lower


def _forward(lower: list[list[float]], right: Sequence[float]) -> list[float]:
    solved: list[float] = []
    for line, value in zip(lower, right, strict=True):
        solved.append((value - sum(map(float.__mul__, line, solved))) / line[-1])
    return solved
