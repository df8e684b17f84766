"""The table of measurements: complete, well-formed, and every row of the documents in it."""

from collections import Counter

import pytest

from stoker.plan.answer import Question, answer, recipes
from stoker.plan.cases import box_of, case_of, why_not
from stoker.plan.catalog import boxes, read, schemes
from stoker.plan.evidence import kind_of, measurements, of_model


def test_every_row_says_what_it_is() -> None:
    ids = [row.id for row in measurements()]
    assert len(ids) == len(set(ids)) == 799
    for row in measurements():
        assert row.timing in ("decode-only", "end-to-end", "unstated"), row.id
        assert row.scope in ("per_stream", "aggregate"), row.id
        assert row.evidence in ("A", "B", "C"), row.id
        assert row.source, row.id
        assert row.date, row.id
        assert row.weights in schemes() or row.weights == "" or row.weights.startswith("gguf:"), row.id
        assert row.box == "r9700" or row.box in {box.key for box in boxes()}, row.id
        assert row.decode_tok_s or row.prefill_tok_s, row.id
        assert row.drafter != "none" or row.tokens_per_step == 1.0, row.id
        if row.tokens_per_step and row.depth:
            assert 1.0 <= row.tokens_per_step <= 1 + row.depth, row.id


@pytest.mark.parametrize(
    ("model", "speeds"),
    [
        ("Qwen3.5-122B-A10B", {28.3, 30.8, 38.4, 51.0, 28.2, 51.58, 59.0, 81.0, 47.0, 40.0, 28.0}),
        ("Qwen3-235B-A22B", {17.0, 12.1, 24.1, 9.1, 36.4}),
        ("Qwen3.6-35B-A3B", {51.86, 53.8, 97.7}),
        ("gpt-oss-120b", {33.5, 55.57}),
    ],
)
def test_the_documents_rows_are_there(model: str, speeds: set[float]) -> None:
    assert speeds <= {row.decode_tok_s for row in of_model(model)}


def test_nearest_rows_are_alike_in_the_whole_case() -> None:
    """Model, box, users, context and drafting: not one of them alone decides."""
    agent = answer(Question("122b", "spark", weights="int4", draft="dflash:12", workload="agent", context=100_000))
    assert {row.id for row in agent.evidence[:2]} == {"m065", "m045"}
    crowd = Question("122b", "spark", weights="nvfp4", draft="mtp:2", kv="fp8", context=108_000, users=4)
    assert answer(crowd).evidence[0].id == "m020"
    general = answer(Question("122b", "spark", draft="mtp:2"))
    assert {row.id for row in general.evidence[:2]} == {"m081", "m082"}
    assert max(Counter(row.held_out_with for row in general.evidence).values()) <= 4
    pair = answer(Question("235b", "2xspark", users=4))
    assert (pair.evidence[0].users, pair.evidence[0].boxes) == (4, 2)


def test_workloads_are_told_apart() -> None:
    assert kind_of("agent tool calls, 73% tool-calls, ~100K context") == "agent"
    assert [kind_of(w) for w in ("JSON-KIE", "LongCode", "Hungarian", "mtp-bench")] == [
        "agent",
        "code",
        "prose",
        "mixed",
    ]


def test_what_cannot_be_predicted_says_why() -> None:
    reasons = {row.id: why_not(row) for row in measurements()}
    assert reasons["m054"] == reasons["m018"] == ""
    assert reasons["m075"] == ""  # its acceptance is not stated, and assumed
    assert "weights not stated" in reasons["m046"]
    assert "drafter" in reasons["m232"]
    assert reasons["m390"] == ""  # only evidence, but its shape is known
    assert "neither shape nor size" in reasons["m332"]


def test_an_acceptance_is_assumed_where_a_row_does_not_state_it() -> None:
    rows = {row.id: row for row in measurements()}
    assert case_of(rows["m082"]).assumed is False
    assert case_of(rows["m082"], blind=True).assumed is True
    assert case_of(rows["m085"]).assumed is True
    assert case_of(rows["m054"], blind=True).assumed is False  # nothing is drafted


def test_two_boxes_are_one_with_two_devices() -> None:
    row = next(row for row in measurements() if row.id == "m049")
    box = box_of(row)
    assert box is not None
    assert box.devices == 2


def test_recipes_name_rows_that_exist() -> None:
    ids = {row.id for row in measurements()}
    for name, recipe in recipes().items():
        assert set(recipe["rows"]) <= ids, name
        assert recipe["weights"] in schemes(), name
    for drafter in read("acceptance.toml").values():
        for entry in drafter.values():
            row = next(row for row in measurements() if row.id == entry["row"])
            assert row.depth == entry["depth"]
            assert row.tokens_per_step == entry["tokens_per_step"]
