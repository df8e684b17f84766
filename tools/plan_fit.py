"""Fits the few numbers of `speed.Fit` to published single-stream rows, and says how wrong it is on unseen sources.

Least squares on log speeds with a prior on every number (speed.prior). Long tables count less per row, so that a
hundred rows do not outvote ten posts; unverified rows count less; large misses count linearly. numpy only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import exp, log

import numpy as np

from stoker.plan.catalog import Box, boxes, by_row_name, schemes
from stoker.plan.evidence import Row, measurements
from stoker.plan.families import by_size
from stoker.plan.models import Model
from stoker.plan.speed import AS, Fit, Speed, predict, prior, prompt_flops
from stoker.sizes.step import Draft
from stoker.sizes.weights import Scheme, WeightBytes

SHORT_PROMPT = 30  # tokens, where a row does not say
SHORT_CONTEXT = 512
ROW_NOISE = 0.07  # of a log speed; runs of one recipe on one box differ by 6-7 %
FULL_WEIGHT = 10  # rows of one source that count in full; a longer table counts less per row
STEPS, SMALL = 40, 1e-3
PARTS = ("routed", "shared", "dense", "deltanet", "attention", "head", "embedding")


@dataclass(frozen=True)
class Case:
    """A row with everything needed to predict it."""

    row: Row
    model: Model
    weights: WeightBytes
    box: Box
    draft: Draft

    def decode(self, fit: Fit) -> Speed:
        row = self.row
        return predict(
            self.model, self.weights, self.box, self.draft, accepted=row.tokens_per_step or 1.0, kind=row.kind,
            context=row.context_tokens or SHORT_CONTEXT, users=row.users, kv_item=1.0 if row.kv == "fp8" else 2.0,
            engine=row.engine, backend=row.backend, fit=fit,
        )  # fmt: skip

    def predict(self, fit: Fit) -> float:
        """Tokens per second as the row measures them."""
        row, decode = self.row, self.decode(fit).per_user
        if row.timing != "end-to-end" or not row.output_tokens:
            return decode
        first = predict(  # the prompt, as one step of that many tokens
            self.model, self.weights, self.box, Draft("lookup", SHORT_PROMPT - 1), kind=row.kind,
            context=SHORT_PROMPT, engine=row.engine, backend=row.backend, fit=fit,
        ).step_s  # fmt: skip
        return row.output_tokens / (first + row.output_tokens / decode)


def scheme_of(key: str) -> Scheme:
    if key.startswith("gguf:"):
        return Scheme(key, f"GGUF, about {key.removeprefix('gguf:')} bits a weight", dict.fromkeys(PARTS, key), "trunk",
                      approximate=True)  # fmt: skip
    return schemes()[key]


@cache
def weighed(model: Model, key: str) -> WeightBytes:
    return WeightBytes.of(model, scheme_of(key))


def why_not(row: Row) -> str:
    """Why a row cannot be predicted; empty if it can."""
    if row.users != 1 or row.decode_tok_s is None:
        return "several users, or no decode speed"
    if row.drafter not in ("none", "mtp", "dflash"):
        return "a drafter the planner does not know"
    if row.tokens_per_step is None or row.depth is None:
        return "acceptance or depth not stated"
    if not row.weights or box_of(row) is None:
        return "weights not stated, or not of a kind the planner counts"
    if row.model.lower() not in by_row_name() and not (row.active_b and row.drafter == "none"):
        return "neither shape nor size of the model known"
    return ""


def cases(shape_known: bool = True) -> list[Case]:
    """The rows that can be predicted: of models whose shape is known, or of those known by their size alone."""
    found = []
    for row in measurements():
        box, model = box_of(row), by_row_name().get(row.model.lower())
        if why_not(row) or box is None or bool(model) != shape_known:
            continue
        model = model or by_size(row.model, 1e9 * (row.active_b or 0.0))
        found.append(Case(row, model, weighed(model, row.weights), box, Draft(row.drafter, row.depth or 0)))
    return found


def box_of(row: Row) -> Box | None:
    """The box of a row. Several boxes are one with as many devices; a pair of cards has its own entry."""
    box = next((b for b in boxes() if b.key == row.box), None)
    if row.box == "r9700":
        pair = next(b for b in boxes() if b.key == "dual-r9700")
        return replace(pair, devices=row.boxes)
    return replace(box, devices=box.devices * row.boxes) if box and row.boxes > 1 else box


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
    """A row and a fit; for what they are compared, one that saw nothing of the row's source."""

    case: Case
    fit: Fit

    @cached_property
    def predicted(self) -> float:
        return self.case.predict(self.fit)

    @property
    def limit(self) -> float:
        return self.case.decode(self.fit).limit

    @property
    def log_error(self) -> float:
        return log(self.predicted / (self.case.row.decode_tok_s or 1.0))

    @property
    def error(self) -> float:
        return abs(exp(self.log_error) - 1.0)


def fits_without_a_source(
    cases: Sequence[Case], progress: Callable[[str, int, int], None] | None = None
) -> dict[str, Fit]:
    """Source -> the fit to all others' rows; under "" the fit to all."""
    sources = ["", *sorted({case.row.held_out_with for case in cases})]
    fits = {}
    for i, source in enumerate(sources):
        if progress:
            progress(source, i, len(sources))
        fits[source] = fit_to([case for case in cases if case.row.held_out_with != source])
    return fits


def leave_one_source_out(cases: Sequence[Case], fits: Mapping[str, Fit]) -> tuple[Held, ...]:
    """Every row with the fit that knows nothing of its source; `fits` as `fits_without_a_source` makes them."""
    return tuple(Held(case, fits.get(case.row.held_out_with, fits[""])) for case in cases)


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


def fit_prefill() -> dict[str, float]:
    """Share of peak arithmetic that prompts reach, per engine and for dense and sparse models: the median over models,
    each the median of its rows, each of those corrected for the attention it does."""
    shares: dict[str, dict[tuple[str, str], list[float]]] = {}
    for row in measurements():
        box, model = box_of(row), by_row_name().get(row.model.lower())
        if not row.prefill_tok_s or not box or not model or row.users != 1 or (row.context_tokens or 0) < 1024:
            continue
        seen = float(row.context_tokens or 0) * (1.0 if "depth" in row.workload else 0.5)
        flops = row.prefill_tok_s * prompt_flops(model, seen)
        key = f"prefill:{AS.get(row.engine, row.engine)}:{'sparse' if model.experts else 'dense'}"
        of_model = shares.setdefault(key, {}).setdefault((row.source, row.model), [])
        of_model.append(flops / (box.tflops_bf16 * 1e12 * box.devices))
    medians = {key: [float(np.median(rows)) for rows in found.values()] for key, found in shares.items()}
    return {key: round(log(float(np.median(found))), 4) for key, found in medians.items()}
