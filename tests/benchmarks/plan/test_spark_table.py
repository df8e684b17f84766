"""Texts with published acceptance, and the table of a Spark that is predicted from them."""

import json
import math
from dataclasses import replace

import pytest
from benchmarks.plan.acceptance import ACCEPTED, KINDS, MEASURED_AT, Drafts, Shape

from benchmarks.plan import acceptance, replay, spark, spark_table


@pytest.fixture(scope="module")
def world() -> spark_table.World:
    return spark_table.believed()


def test_made_texts_meet_the_published_acceptance(world):
    for kind in KINDS:
        texts = acceptance.make(world.drafts, kind, 12, 400)
        for name, kinds in ACCEPTED.items():
            blocks = [block for text in texts for block in text.blocks[name]]
            mean = sum(block.right for block in blocks) / len(blocks)
            assert mean == pytest.approx(kinds[kind], rel=0.01), (kind, name)
            assert {len(block.sure) for block in blocks} == {MEASURED_AT[name]}


def test_the_published_row_by_place_is_met_within_its_own_noise(world):
    for share, counted in zip(
        acceptance.by_place(world.drafts.shape), (acceptance.FIRST, acceptance.LAST), strict=True
    ):
        noise = math.sqrt(acceptance.BLOCKS * share * (1 - share))
        assert abs(acceptance.BLOCKS * share - counted) < 2 * noise


def test_confidence_tells_as_well_as_it_is_said_to(world):
    shape = world.drafts.shape
    level = acceptance.level(shape, 12, ACCEPTED["dflash"]["code"])
    assert acceptance.tells(level, shape) == pytest.approx(acceptance.TELLS, abs=0.01)
    equal = acceptance.make(replace(world.drafts, shape=Shape(0.0)), "code", 1, 50)[0]
    assert len({sure for block in equal.blocks["dflash"] for sure in block.sure}) == 1


def test_cheaper_drafts_are_right_less_often(world):
    def right(drafts: Drafts) -> int:
        return sum(block.right for block in acceptance.make(drafts, "agent", 2, 300)[0].blocks["dflash"])

    assert right(replace(world.drafts, loss=0.05)) < right(world.drafts)


def test_a_trimmed_head_and_an_int4_drafter_read_a_quarter():
    recipe, cheap = (spark.Spark(0.0, weights) for weights in (spark_table.RECIPE, spark_table.CHEAP))
    assert recipe.dflash_bytes == pytest.approx(2.2e9, rel=0.1)
    assert cheap.dflash_bytes <= 0.65e9


def test_the_acceptance_that_a_published_speed_implies_gives_that_speed(world, monkeypatch):
    monkeypatch.setattr(spark_table, "TEXTS", 4)
    case = spark_table.CASES[0]
    found = spark_table.implied(case, world, [])
    assert spark_table.predict(case, spark_table.BASE, spark_table._with(world, case, found), []) == pytest.approx(
        case.published, rel=0.02
    )


def test_the_table_holds_every_case_and_every_changed_assumption(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(spark_table, "TEXTS", 2)
    monkeypatch.setattr(spark_table, "TOKENS", 60)
    monkeypatch.setattr(spark_table, "CASES", spark_table.CASES[:3])
    monkeypatch.setattr(acceptance, "FITTED_ON", 500)
    monkeypatch.setattr("sys.argv", ["spark_table", "--json", str(tmp_path / "table.json")])
    spark_table.main()
    report = json.loads((tmp_path / "table.json").read_text())
    assert [row["case"] for row in report["cases"]] == [case.name for case in spark_table.CASES]
    variants = list(spark_table.variants(spark_table.believed()))
    assert [row["assumption"] for row in report["sensitivity"]] == ["as assumed", *(name for name, _ in variants)]
    for row in report["cases"]:
        assert set(row["predicted"]) == {way.name for way in spark_table.WAYS}
    shown = capsys.readouterr().out
    assert "predicted" in shown
    assert "agent turns" in shown


def test_noise_and_bandwidth_change_what_is_simulated(world):
    texts = acceptance.make(world.drafts, "code", 2, 100)
    box = spark.Spark(world.fixed_s, spark_table.RECIPE)

    def seconds(box: spark.Spark, noise: float) -> float:
        return replay.run(texts, replay.Strategy("dflash", 12, box), 0, 1, noise)["code"].seconds

    still = seconds(box, 0.0)
    assert seconds(box, 0.0) == still != seconds(box, 0.07)
    assert seconds(replace(box, bandwidth=2 * spark.BANDWIDTH), 0.0) < still
