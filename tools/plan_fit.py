"""Fits the few numbers of `speed.Fit` to published single-stream rows, and says how wrong it is on unseen sources.

Least squares on log speeds with a prior on every number (speed.prior). Long tables count less per row, so that a
hundred rows do not outvote ten posts; unverified rows count less; large misses count linearly. numpy only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import exp, log

import numpy as np

from stoker.plan.cases import Case, box_of, cases_of
from stoker.plan.catalog import by_row_name, read
from stoker.plan.correction import Correction, Corrector, known_of, setting_of
from stoker.plan.evidence import Row, measurements
from stoker.plan.speed import AS, Fit, fitted, prior, prompt_flops, unseen

ROW_NOISE = 0.07  # of a log speed; runs of one recipe on one box differ by 6-7 %
FULL_WEIGHT = 10  # rows of one source that count in full; a longer table counts less per row
STEPS, SMALL = 40, 1e-3
NO_CORRECTION = Correction()


def cases(shape_known: bool = True) -> list[Case]:
    """The rows of single streams with known acceptance: of models whose shape is known and modelled, or of the
    others. The fit is made to the former."""
    return [case for case in all_cases() if case.row.users == 1 and not case.assumed and known(case) == shape_known]


@cache
def all_cases() -> tuple[Case, ...]:
    return tuple(cases_of(measurements()))


def known(case: Case) -> bool:
    """Whether the fit may be made to it: its shape is known, and how its layers work is among what is modelled."""
    return case.row.model.lower() in by_row_name() and case.row.model.lower() not in _not_fitted()


@cache
def _not_fitted() -> frozenset[str]:
    return frozenset(
        name.lower()
        for entry in read("others.toml")["other"]
        if not entry.get("fitted", True)
        for name in entry["rows"]
    )


def names_in(cases: Sequence[Case]) -> list[str]:
    """The numbers these rows can tell something about."""
    names = {
        "pool",
        "pool:prose",
        "pool:code",
        "pool:agent",
        "pool:counting",
        "pool:dflash",
        "pool:dflash:prose",
        "link",
    }
    for case in cases:
        engine = AS.get(case.row.engine, case.row.engine)
        names |= {f"box:{case.box.key}", f"layer:{engine}", f"pass:{engine}", f"tokens:{engine}"}
        names |= {f"format:{engine}:fine", f"format:{engine}:plain", "layer:rocm", "layer:card"}
    return sorted(names)


def fit_to(cases: Sequence[Case]) -> Fit:
    names = names_in(cases)
    priors = np.array([prior(name) for name in names])
    counts: dict[str, int] = {}
    for case in cases:
        counts[case.row.held_out_with] = counts.get(case.row.held_out_with, 0) + 1
    shares = {source: min(1.0, (FULL_WEIGHT / count) ** 0.5) for source, count in counts.items()}
    trust = np.array([shares[case.row.held_out_with] * _grade(case.row) for case in cases])
    measured = np.array([log(case.row.decode_tok_s or 1.0) for case in cases])

    def misses(values: np.ndarray) -> np.ndarray:
        fit = Fit(dict(zip(names, values, strict=True)), {"all": (0.0, 0.0)})
        return np.array([log(case.predict(fit)) for case in cases]) - measured

    values = priors[:, 0].copy()
    for _ in range(STEPS):
        miss = misses(values)
        # a miss of several times the noise counts linearly, not squared
        robust = trust * np.minimum(1.0, 2.0 * ROW_NOISE / np.maximum(np.abs(miss), 1e-9)) ** 0.5
        slopes = _slopes(misses, values, miss)
        left = np.vstack([slopes * (robust / ROW_NOISE)[:, None], np.diag(1.0 / priors[:, 1])])
        right = np.concatenate([miss * robust / ROW_NOISE, (values - priors[:, 0]) / priors[:, 1]])
        step = np.linalg.lstsq(left, right, rcond=None)[0]
        values = values - np.clip(step, -0.5, 0.5)
        if np.abs(step).max() < SMALL:
            break
    rounded = {name: round(float(value), 4) for name, value in zip(names, values, strict=True)}
    errors = np.sqrt(np.diag(np.linalg.inv(left.T @ left)))
    deviations = {name: round(float(error), 4) for name, error in zip(names, errors, strict=True)}
    return Fit(rounded, {"all": (0.0, 0.0)}, deviations)


def _slopes(
    function: Callable[[np.ndarray], np.ndarray], values: np.ndarray, at: np.ndarray, small: float = 1e-3
) -> np.ndarray:
    columns = []
    for i in range(len(values)):
        moved = values.copy()
        moved[i] += small
        columns.append((function(moved) - at) / small)
    return np.stack(columns, axis=1)


def _grade(row: Row) -> float:
    return {"A": 1.0, "B": 0.7, "C": 0.4}[row.evidence]


@dataclass(frozen=True)
class Held:
    """A row, a fit and a correction; for what they are compared, some that saw nothing of the row's source."""

    case: Case
    fit: Fit
    correction: Correction = NO_CORRECTION

    @cached_property
    def uncorrected(self) -> float:
        return self.case.predict(self.fit)

    @cached_property
    def predicted(self) -> float:
        return min(self.uncorrected * self.correction.factor, self.limit)

    @property
    def limit(self) -> float:
        speed = self.case.decode(self.fit)
        return speed.limit if self.case.row.scope == "aggregate" else speed.limit / speed.users

    @property
    def log_error(self) -> float:
        return log(self.predicted / (self.case.row.decode_tok_s or 1.0))

    @property
    def error(self) -> float:
        return abs(exp(self.log_error) - 1.0)

    @property
    def low(self) -> float:
        return min(self.uncorrected * self.correction.low, self.predicted)

    @property
    def high(self) -> float:
        return min(self.uncorrected * self.correction.high, self.limit)

    @property
    def holds(self) -> bool:
        measured = self.case.row.decode_tok_s or 0.0
        return self.low * (1 - 1e-9) <= measured <= self.high * (1 + 1e-9)

    @property
    def width(self) -> float:
        """Of the range, as the logarithm of its ends' ratio."""
        return log(self.high / self.low)


def corrected(
    cases: Sequence[Case], rows: Sequence[Row], fit: Fit, spread: Mapping[str, tuple[float, float]], blind: bool = False
) -> list[Held]:
    """Cases predicted by a fit, each corrected by those of the rows that are most like it."""
    known = known_of(rows, fit, blind)
    found = []
    for case in cases:
        here = setting_of(case)
        engine = AS.get(case.row.engine, case.row.engine)
        usual = spread.get(engine, spread["all"])
        correction = Corrector(here, known).correct(here, case.predict(fit), usual, unseen(case.box, fit))
        found.append(Held(case, fit, correction))
    return found


def fits_without_a_source(
    cases: Sequence[Case], progress: Callable[[str, int, int], None] | None = None
) -> dict[str, Fit]:
    """Source -> the fit to all others' rows; under "" the fit to all."""
    sources = ["", *sorted({case.row.held_out_with for case in cases})]
    fits = {}
    for i, source in enumerate(sources):
        if progress:
            progress(source, i, len(sources))
        fit = fit_to([case for case in cases if case.row.held_out_with != source])
        fits[source] = replace(fit, values={**fit.values, **fit_prefill(without=source)})
    return fits


def leave_one_source_out(cases: Sequence[Case], fits: Mapping[str, Fit], correcting: bool = True) -> tuple[Held, ...]:
    """Every row by a fit that knows nothing of its source, and corrected by rows of others alone; `fits` as
    `fits_without_a_source` makes them."""
    found: list[Held] = []
    for source in sorted({case.row.held_out_with for case in cases}):
        of_source = [case for case in cases if case.row.held_out_with == source]
        fit = fits.get(source, fits[""])
        if not correcting:
            found += [Held(case, fit) for case in of_source]
            continue
        others = [row for row in measurements() if row.held_out_with != source]
        found += corrected(of_source, others, fit, fitted().spread)
    return tuple(found)


def spread_of(held: Sequence[Held]) -> dict[str, tuple[float, float]]:
    """Per engine, the log errors below which 10 % and 90 % of held-out rows lie."""
    by_engine: dict[str, list[float]] = {"all": [h.log_error for h in held]}
    for h in held:
        by_engine.setdefault(AS.get(h.case.row.engine, h.case.row.engine), []).append(h.log_error)
    found = {}
    for engine, errors in by_engine.items():
        if len(errors) >= 20:
            low, high = np.quantile(errors, [0.1, 0.9])
            found[engine] = (round(float(min(low, -0.05)), 4), round(float(max(high, 0.05)), 4))
    return found


def fit_prefill(without: str = "") -> dict[str, float]:
    """Share of peak arithmetic that prompts reach, per engine and for dense and sparse models: the median over models,
    each the median of its rows, each of those corrected for the attention it does."""
    shares: dict[str, dict[tuple[str, str], list[float]]] = {}
    for row in measurements():
        box, model = box_of(row), by_row_name().get(row.model.lower())
        if not row.prefill_tok_s or not box or not model or row.users != 1 or (row.context_tokens or 0) < 1024:
            continue
        if row.held_out_with == without:
            continue
        seen = float(row.context_tokens or 0) * (1.0 if "depth" in row.workload else 0.5)
        flops = row.prefill_tok_s * prompt_flops(model, seen)
        key = f"prefill:{AS.get(row.engine, row.engine)}:{'sparse' if model.experts else 'dense'}"
        of_model = shares.setdefault(key, {}).setdefault((row.source, row.model), [])
        of_model.append(flops / (box.tflops_bf16 * 1e12 * box.devices))
    medians = {key: [float(np.median(rows)) for rows in found.values()] for key, found in shares.items()}
    return {key: round(log(float(np.median(found))), 4) for key, found in medians.items()}
