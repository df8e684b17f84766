"""Speed: never above the physical limit, less with more to read, and near what was published."""

import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tools.plan_fit import Held, cases, fit_to

from stoker.errors import RequestError
from stoker.plan.acceptance import Acceptance, acceptance, chance_of, emitted
from stoker.plan.cases import SHORT_PROMPT
from stoker.plan.catalog import Box, boxes, by_row_name, find_box, find_model, find_scheme, models, schemes
from stoker.plan.evidence import measurements
from stoker.plan.forecast import Forecaster
from stoker.plan.speed import ENGINES, Fit, Speed, first_token_s, fitted, predict
from stoker.sizes.step import Draft, distinct_experts, step_reads
from stoker.sizes.weights import WeightBytes

drafts = st.sampled_from([Draft(), Draft("mtp", 1), Draft("mtp", 3), Draft("dflash", 12), Draft("lookup", 8)])


def speed(name: str, box: str, weights: str, draft: Draft = Draft(), **options: object) -> Speed:  # noqa: B008
    model = find_model(name)
    return predict(model, WeightBytes.of(model, find_scheme(weights)), find_box(box), draft, **options)  # type: ignore[arg-type]


every_model = {model.name: model for model in by_row_name().values()}  # those that are only evidence among them
any_box = st.sampled_from(boxes())
unseen_box = st.builds(
    lambda box, peak, share: replace(box, key="unseen", bandwidth_gb_s=peak, achievable_gb_s=share * peak),
    any_box, st.floats(10, 20_000), st.floats(0.3, 1.0),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(every_model)),
    any_box | unseen_box,
    st.sampled_from(sorted(schemes())),
    drafts,
    st.floats(0.0, 1.0),
    st.sampled_from(["prose", "code", "agent", "mixed"]),
    st.integers(1, 262_144),
    st.integers(1, 64),
    st.sampled_from(ENGINES),
)
@example(
    "Llama-3.3-70B",
    replace(find_box("spark"), key="unseen", bandwidth_gb_s=10.0, achievable_gb_s=10.0),
    "bf16",
    Draft(),
    0.0,
    "mixed",
    1,
    1,
    "llama.cpp",
)  # a box said to deliver all it has, and an engine that reads well
def test_no_prediction_exceeds_the_physical_limit(
    name: str, box: Box, weights: str, draft: Draft, share: float, kind: str, context: int, users: int, engine: str
) -> None:
    model, accepted = every_model[name], 1.0 + share * (draft.verified - 1)
    weighed = WeightBytes.of(model, find_scheme(weights))
    found = predict(model, weighed, box, draft, accepted=accepted, kind=kind, context=context, users=users,
                    engine=engine)  # fmt: skip
    assert 0 < found.low <= found.tokens_per_s <= found.high <= found.limit * (1 + 1e-9)
    # and the limit itself is that of the bus: a step reads at least what one token needs
    one = step_reads(model, weighed, Draft(), context=1, users=1, pool=0.0, kv_item=1.0)
    bus = box.bandwidth_gb_s * 1e9 * box.devices
    assert found.limit <= users * accepted * bus / one.total * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([model.name for model in models()]), drafts, st.integers(1, 100_000), st.integers(0, 50_000),
    st.integers(1, 16),
)  # fmt: skip
def test_a_longer_context_or_company_never_speeds_a_user_up(
    name: str, draft: Draft, context: int, more: int, users: int
) -> None:
    here = speed(name, "spark", "bf16", draft, context=context, users=users)
    assert speed(name, "spark", "bf16", draft, context=context + more, users=users).per_user <= here.per_user
    assert speed(name, "spark", "bf16", draft, context=context, users=users + 1).per_user <= here.per_user


@settings(max_examples=100, deadline=None)
@given(st.floats(1, 400), st.integers(1, 16), st.floats(1, 512))
def test_distinct_experts(tokens: float, top_k: int, pool: float) -> None:
    found = distinct_experts(tokens, top_k, pool)
    assert found <= max(pool, top_k) + 1e-9
    assert found <= tokens * top_k + 1e-6
    assert distinct_experts(1, top_k, pool) == pytest.approx(top_k)


def test_design_numbers_of_distinct_experts() -> None:
    """8, 23 and 87 for 1, 3 and 13 tokens if routing were independent."""
    assert [round(distinct_experts(t, 8, 256)) for t in (1, 3, 13)] == [8, 23, 87]


def test_acceptance_of_other_depths() -> None:
    assert emitted(0.5, 3) == 1.875
    assert emitted(chance_of(2.24, 2), 2) == pytest.approx(2.24)
    assert acceptance(Draft("mtp", 2), "prose").tokens_per_step == pytest.approx(2.24)
    assert 1 < acceptance(Draft("mtp", 1), "prose").tokens_per_step < 2
    assert acceptance(Draft(), "prose").tokens_per_step == 1.0
    with pytest.raises(RequestError, match="from 1 to 3"):
        acceptance(Draft("mtp", 2), "prose", 3.5)


@pytest.mark.parametrize(
    ("tokens_per_s", "options"),
    [
        (28.3, {"weights": "int4"}),
        (30.8, {"weights": "int4+fp8"}),
        (38.4, {"weights": "int4+fp8", "draft": Draft("mtp", 1), "accepted": 1.95}),
        (51.0, {"weights": "int4+fp8+int8head", "draft": Draft("mtp", 2), "accepted": 2.6}),
        (59.0, {"weights": "int4+fp8+int8head", "draft": Draft("dflash", 12), "accepted": 6.4}),
        (
            81.0,
            {"weights": "int4", "draft": Draft("dflash", 12), "accepted": 8.66, "kind": "agent", "context": 100_000},
        ),
        (17.0, {"name": "235b", "box": "2xspark", "weights": "gptq-int4", "kv_item": 1.0}),
        (24.1, {"name": "235b", "box": "2xspark", "weights": "gptq-int4", "kv_item": 1.0, "users": 2}),
        (36.4, {"name": "235b", "box": "2xspark", "weights": "gptq-int4", "kv_item": 1.0, "users": 4}),
        (53.8, {"name": "qwen3.6-35b", "weights": "fp8"}),
        (33.5, {"name": "gpt-oss-120b", "weights": "mxfp4"}),
    ],
)
def test_rows_of_the_documents_lie_near_their_predictions(tokens_per_s: float, options: dict[str, object]) -> None:
    asked: dict[str, Any] = {
        "name": "122b",
        "box": "spark",
        "draft": Draft(),
        "kind": "mixed",
        "context": 512,
        **options,
    }
    model, key = find_model(asked["name"]), asked["weights"]
    kv = "fp8" if asked.get("kv_item") == 1.0 else "bf16"
    cast = Forecaster(model, WeightBytes.of(model, find_scheme(key)), key, find_box(asked["box"]), "vLLM", kv)
    draft = asked["draft"]
    accepted = Acceptance(asked.get("accepted", 1.0), "asked for", draft.drafting, asked=True)
    found = cast.speed(draft, asked["kind"], context=asked["context"], users=asked.get("users", 1), accepted=accepted,
                       fresh=SHORT_PROMPT)  # fmt: skip
    assert found.tokens_per_s == pytest.approx(tokens_per_s, rel=0.15)


def test_first_tokens_of_document_001() -> None:
    model = find_model("122b")
    weights = WeightBytes.of(model, find_scheme("nvfp4"))

    def first(prompt: int, cached: int = 0) -> float:
        return first_token_s(model, weights, find_box("spark"), prompt, cached=cached)

    assert first(20) == pytest.approx(0.27, rel=0.3)
    assert first(7_500) == pytest.approx(4.41, rel=0.3)
    assert first(30_000) == pytest.approx(18.11, rel=0.3)
    assert first(30_000, cached=25_344) < 0.4 * first(30_000)


def test_the_stored_fit_is_as_good_as_it_says() -> None:
    """On the rows it was fitted to; what it does on unseen sources is measured by benchmarks/plan/accuracy.py."""
    errors = [Held(case, fitted()).error for case in cases()]
    assert len(errors) > 180
    assert statistics.median(errors) <= 0.12
    assert sorted(errors)[int(0.9 * len(errors))] <= 0.30
    assert fitted().spread.keys() >= {"all", "vLLM", "llama.cpp"}


def test_a_source_that_was_never_seen() -> None:
    """One fold of the cross-validation: document 001 predicted by everybody else's rows."""
    seen = [
        c for c in cases() if c.row.held_out_with != "document 001" and c.row.box == "spark" and c.row.engine == "vLLM"
    ]
    held = [c for c in cases() if c.row.source == "document 001"]
    fit = fit_to(seen)
    assert len(held) == 16
    assert statistics.median(Held(case, fit).error for case in held) <= 0.12


def test_a_fit_finds_the_numbers_rows_were_made_with() -> None:
    """Rows made up from known numbers: the fit must lead back to their speeds, and no prior may hide that."""
    truth = Fit({"layer:vLLM": -1.2, "box:spark": -0.1, "pass:vLLM": 1.5, "pool": -1.4}, {"all": (0.0, 0.0)})
    made = []
    for case in cases():
        if case.row.engine == "vLLM" and case.row.box == "spark" and case.row.boxes == 1:
            row = replace(case.row, decode_tok_s=case.predict(truth), timing="decode-only", evidence="A")
            made.append(replace(case, row=row))
    fit = fit_to(made)
    worst = max(Held(case, fit).error for case in made)
    at_priors = max(Held(case, Fit({}, truth.spread)).error for case in made)
    assert worst < 0.08 < at_priors


def test_nothing_measured_with_known_weights_beats_its_limit_but_the_doubtful() -> None:
    """A row above the limit has other weights, other drafts or a wrong number; there is one, crowd-submitted."""
    above = {
        case.row.id
        for case in cases()
        if (case.row.decode_tok_s or 0.0)
        > predict(
            case.model, case.weights, case.box, case.draft, accepted=case.row.tokens_per_step or 1.0,
            context=case.row.context_tokens or 1, kv_item=1.0, engine=case.row.engine, kind=case.row.kind,
        ).limit
    }  # fmt: skip
    assert above == {"m320"}
    assert next(row for row in measurements() if row.id == "m320").evidence == "C"
