"""The table of measurements: complete, well-formed, and every row of the documents in it."""

from collections import Counter

import pytest
from tools.plan_fit import box_of, why_not

from stoker.plan.answer import recipes
from stoker.plan.catalog import boxes, read, schemes
from stoker.plan.evidence import kind_of, measurements, nearest, of_model


def test_every_row_says_what_it_is() -> None:
    ids = [row.id for row in measurements()]
    assert len(ids) == len(set(ids)) == 785
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


def test_nearest_rows_are_of_the_same_box_and_drafter() -> None:
    rows = nearest("Qwen3.5-122B-A10B", "spark", 1, "int4", "dflash", "agent", 1)
    assert rows[0].id in {"m065", "m045"}
    assert {(row.box, row.drafter) for row in rows} == {("spark", "dflash")}
    assert max(Counter(row.held_out_with for row in rows[:3]).values()) <= 2, (
        "nobody's third row before another's first"
    )
    assert nearest("Qwen3-235B-A22B", "spark", 2, "gptq-int4", "none", "prose", 4)[0].users == 4


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
    assert reasons["m054"] == ""
    assert "several users" in reasons["m018"]
    assert "acceptance" in reasons["m075"]
    assert "weights not stated" in reasons["m046"]
    assert reasons["m390"] == ""  # only evidence, but its shape is known
    assert "neither shape nor size" in reasons["m332"]


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
