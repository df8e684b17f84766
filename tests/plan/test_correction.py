"""Predictions agree with what was measured of cases like them: corrected, with a range that holds the recipe's rows."""

from collections.abc import Callable
from dataclasses import replace
from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tools import plan_fit as fitting

from stoker.plan.answer import Question, answer
from stoker.plan.cases import cases_of
from stoker.plan.correction import Corrector, Known, covariance, known_of, setting_of
from stoker.plan.evidence import AGENT, COUNTING, Row, measurements, of_model
from stoker.plan.likeness import Setting, likeness, same_recipe
from stoker.plan.speed import fitted

SPREAD = (-0.12, 0.14)
HERE = Setting("a", "int4", "spark", 1, "vLLM", "", "mtp", 2, "mixed", 512, 1)


@pytest.mark.parametrize(
    ("question", "measured"),
    [
        (Question("122b", "spark", draft="mtp:2"), (51.0, 51.58)),
        (Question("122b", "spark", draft="mtp:2", context=512), (51.0, 51.58)),
        (Question("122b", "spark", draft="dflash:12"), (59.0,)),
        (Question("122b", "spark", draft="dflash:12", weights="int4", workload="agent", context=100_000), (81.0,)),
        (Question("122b", "spark", draft="none", weights="int4", context=512), (28.3, 28.2)),
        (Question("qwen3.6-35b", "spark", weights="nvfp4-mixed", draft="mtp:2", context=8192), (97.7,)),
        (Question("gpt-oss-120b", "spark"), (57.5, 59.5)),
        (Question("gpt-oss-120b", "2x spark", users=8, context=1024), (231.0,)),
        (Question("122b", "spark", weights="nvfp4", draft="mtp:2", kv="fp8", context=108_000, users=4), (14.65,)),
        (Question("235b", "2xspark", users=4, context=512, kv="fp8"), (36.4,)),
        (Question("122b", "strix-halo", draft="none", context=512), (21.63,)),
    ],
)
def test_the_range_of_a_plan_holds_what_was_measured_of_its_recipe(
    question: Question, measured: tuple[float, ...]
) -> None:
    speed = answer(question).speed
    assert all(speed.low <= value <= speed.high for value in measured), (speed.low, speed.high)
    assert speed.high < 2 * speed.low


def test_a_correction_says_what_it_was_made_towards() -> None:
    found = answer(Question("122b", "spark", draft="mtp:2"))
    assert {"m081", "m082"} <= {row.id for row in found.correction.towards}
    assert found.speed.uncorrected < 42 < found.speed.tokens_per_s
    assert not answer(Question("122b", "spark", draft="none", weights="int4", context=512)).correction.towards


MODELS = ("Qwen3.5-122B-A10B", "gpt-oss-120b", "Nemotron-3-Super-120B-A12B", "Qwen3-235B-A22B", "Ling-3.0-flash")


@pytest.mark.parametrize("models", [MODELS, pytest.param((), marks=pytest.mark.long, id="all")])
def test_every_graded_row_lies_in_the_range_of_its_own_case_and_ranges_are_no_wider_than_without(
    models: tuple[str, ...],
) -> None:
    fit = fitted()
    rows = [row for row in measurements() if not models or row.model in models]
    told = [case for case in cases_of(rows) if not case.assumed]
    found = fitting.corrected(told, rows, fit, fit.spread)
    graded = [h for h in found if h.case.row.evidence == "A"]
    assert len(graded) > (90 if models else 600)
    assert [h.case.row.id for h in graded if not h.holds] == []
    widths = sorted(h.width for h in found if h.case.row.users == 1)
    assert widths[len(widths) // 2] < min(high - low for low, high in fit.spread.values())


def test_so_do_rows_whose_acceptance_nobody_told_the_planner() -> None:
    fit = fitted()
    rows = [row for row in measurements() if "Qwen3" in row.model and row.drafter != "none"]
    blind = [case for case in cases_of(rows, blind=True) if case.row.kind != COUNTING]
    assert len(blind) > 60
    found = fitting.corrected(blind, rows, fit, fit.spread, blind=True)
    assert [h.case.row.id for h in found if h.case.row.evidence == "A" and not h.holds] == []


def test_where_accuracy_is_measured_nothing_of_a_rows_own_source_corrects_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One source's rows in the table trebled: what is predicted of that source stays the same, to the last bit."""
    cases = [case for case in fitting.cases() if case.row.held_out_with == "document 001"]
    rows = of_model("Qwen3.5-122B-A10B")

    def predictions(table: tuple[Row, ...]) -> list[float]:
        monkeypatch.setattr(fitting, "measurements", lambda: table)
        return [held.predicted for held in fitting.leave_one_source_out(cases, {"": fitted()})]

    def trebled(source: str) -> tuple[Row, ...]:
        return tuple(
            replace(row, decode_tok_s=3 * row.decode_tok_s) if row.held_out_with == source and row.decode_tok_s else row
            for row in rows
        )

    plain = predictions(rows)
    assert len(plain) == 16
    assert predictions(trebled("document 001")) == plain
    assert predictions(trebled("Entrpi/qwen3.5-122B-A10B-on-spark")) != plain


def known(setting: Setting, miss: float, source: str = "somebody", grade: str = "A") -> Known:
    row = replace(
        of_model("Qwen3.5-122B-A10B")[0], decode_tok_s=40.0 * 2.718281828**miss, source=source, evidence=grade
    )
    return Known(row, setting, 40.0, False)


def test_a_row_counts_the_more_the_more_it_is_alike() -> None:
    def factor(there: Setting) -> float:
        return Corrector(HERE, [known(there, 0.3)]).correct(HERE, 40.0, SPREAD).factor

    same = factor(HERE)
    changes: list[Callable[[Setting], Setting]] = [
        lambda s: replace(s, kind="code"),
        lambda s: replace(s, depth=6),
        lambda s: replace(s, context=65_536),
        lambda s: replace(s, users=4),
        lambda s: replace(s, weights="nvfp4"),
        lambda s: replace(s, drafter="none", depth=0),
        lambda s: replace(s, box="strix-halo"),
    ]
    assert all(1.0 < factor(change(HERE)) < same for change in changes)
    assert factor(replace(HERE, model="b", box="h200", engine="llama.cpp", drafter="none", depth=0)) == 1.0


def test_three_rows_of_one_source_say_less_than_three_of_three() -> None:
    one = Corrector(HERE, [known(HERE, 0.1)] * 3).correct(HERE, 40.0, SPREAD).factor
    three = Corrector(HERE, [known(HERE, 0.1, source) for source in "abc"]).correct(HERE, 40.0, SPREAD).factor
    assert 1.0 < one < three < 2.718281828**0.1
    doubted = Corrector(HERE, [known(HERE, 0.1, grade="C")]).correct(HERE, 40.0, SPREAD).factor
    assert doubted < Corrector(HERE, [known(HERE, 0.1)]).correct(HERE, 40.0, SPREAD).factor


def test_a_wild_row_does_not_carry_the_others_away() -> None:
    calm = [known(HERE, 0.05, source) for source in "abc"]
    wild = [*calm, known(HERE, 2.0, "d", "B")]
    plain = Corrector(HERE, calm).correct(HERE, 40.0, SPREAD)
    with_it = Corrector(HERE, wild).correct(HERE, 40.0, SPREAD)
    assert abs(log(with_it.factor / plain.factor)) < 0.03
    assert with_it.high == pytest.approx(plain.high, rel=0.05)  # a figure in a post widens no range


kinds, drafters = st.sampled_from(["mixed", "prose", "code", AGENT]), st.sampled_from(["none", "mtp", "dflash"])
any_setting = st.builds(
    Setting, st.sampled_from("ab"), st.sampled_from(["int4", "int4+fp8", "fp8"]), st.sampled_from(["spark", "h200"]),
    st.integers(1, 2), st.sampled_from(["vLLM", "llama.cpp"]), st.sampled_from(["", "rocm", "vulkan"]), drafters,
    st.integers(0, 12), kinds, st.none() | st.integers(0, 200_000), st.integers(1, 32),
    st.sampled_from(["", "bf16", "fp8", "turboquant"]), st.sampled_from([0.0, 0.04]),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(any_setting, any_setting)
def test_likeness_is_mutual_and_never_more_than_being_the_same(a: Setting, b: Setting) -> None:
    assert likeness(a, b) == likeness(b, a)
    assert same_recipe(a, b) == same_recipe(b, a)
    assert covariance(a, b) <= (covariance(a, a) * covariance(b, b)) ** 0.5 + 1e-12


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(any_setting, st.floats(-1, 1)), max_size=12), any_setting)
def test_any_rows_leave_a_range_around_the_prediction(rows: list[tuple[Setting, float]], here: Setting) -> None:
    found = [known(setting, miss, f"source {i % 3}") for i, (setting, miss) in enumerate(rows)]
    result = Corrector(here, found).correct(here, 40.0, SPREAD)
    assert 0 < result.low <= result.factor <= result.high < 10


def test_settings_are_those_of_the_rows() -> None:
    row = next(row for row in measurements() if row.id == "m020")
    (only,) = known_of([row])
    assert (only.setting.users, only.setting.context, only.setting.kv) == (4, 108_000, "fp8")
    assert setting_of(cases_of([row])[0]) == only.setting
    assert only.predicted == pytest.approx(14.65, rel=0.2), "prompts count, most of them cached"
