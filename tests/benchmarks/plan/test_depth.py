"""The simulated Spark agrees with what was published about real ones, and the depth controller earns its keep on it."""

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.plan.replay import Block, Strategy, Text

from benchmarks.plan import chart, depth, replay, spark, traces
from stoker.sampling.settings import Sampling
from stoker.speculate.depth.controller import DepthController
from stoker.speculate.drafter import Draft

# log odds of a draft on average, their spread, and the experts a text draws from
KINDS = {"json": (3.0, 1.5, 40), "code": (2.0, 1.8, 72), "prose": (0.6, 1.5, 28), "random": (-6.0, 1.0, 200)}


def synthetic(kind: str, tokens: int, rng: random.Random, tilt: float) -> Text:
    """Some stretches are easier than others; confidence knows that, but is off by `tilt` and by noise."""
    mean, spread, pool = KINDS[kind]
    ease, odds = 0.0, []
    for _ in range(tokens + 20):
        ease = 0.6 * ease + 0.8 * rng.gauss(0.0, 1.0)
        odds.append(mean + spread * ease)
    blocks: dict[str, list[Block]] = {}
    for name, fading in (("mtp", 0.35), ("dflash", 0.12)):
        blocks[name] = []
        for place in range(tokens):
            sure, right, alive = [], 0, True
            for ahead in range(traces.DEPTHS[name]):
                own = odds[place + ahead] - fading * ahead
                sure.append(_sigmoid(0.8 * own + tilt + rng.gauss(0.0, 0.7)))
                alive = alive and rng.random() < _sigmoid(own)
                right += alive
            touched = [spark.distinct(1 + n, pool) * rng.gauss(1.0, 0.03) for n in range(len(sure) + 1)]
            blocks[name].append(Block(sure, min(right, tokens - place), touched))
    return Text(kind, blocks)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def mix(seed: int, tilt: float = 0.0) -> list[Text]:
    rng = random.Random(seed)
    return [synthetic(kind, 250, rng, tilt) for _ in range(5) for kind in KINDS]


def box() -> spark.Spark:
    return spark.Spark(spark.fit().fixed_s, depth.WEIGHTS)


# -- the box


def test_bytes_of_a_step_are_those_of_the_model() -> None:
    plain = spark.Spark(0.0)
    for found, known in (
        (spark.TOP_K * plain.expert_bytes, 1.87e9),
        (spark.LAYERS * spark.EXPERT * 2, 0.91e9),
        (spark.DELTA_LAYERS * spark.DELTANET * spark.INT4, 1.66e9),
        (spark.FULL_LAYERS * spark.ATTENTION * spark.INT4, 0.49e9),
        (spark.HEAD * 2, 1.53e9),
        (2 * spark.STATE, 0.30e9),
        (plain.fixed_bytes + spark.TOP_K * plain.expert_bytes, 6.8e9),
        (spark.DFLASH, 774e6),
        (spark.MTP_DENSE + spark.EXPERTS * spark.EXPERT, 2_523_679_232),
    ):
        assert found == pytest.approx(known, rel=0.01)


def test_the_six_published_rows_are_met_and_those_fitted_say_so() -> None:
    rows = depth.published(spark.fit())
    required = [row for row in rows if row["required"]]
    assert [row["published_tokens_per_s"] for row in required] == [28.2, 36.0, 51.6, 33.2, 54.5, 81.0]
    assert all(abs(row["error"]) <= 0.10 for row in required)
    assert {row["role"] for row in required if row["published_tokens_per_s"] in (36.0, 51.6)} == {"check"}
    for row in rows:
        if row["role"] != "check":
            assert row["error"] == pytest.approx(0.0, abs=1e-3)


# -- the replay


@pytest.mark.parametrize("drafter", ["mtp", "dflash"])
@pytest.mark.parametrize("tilt", [0.0, 1.0, -1.0])
def test_adaptive_depth_is_never_far_from_the_best_fixed_one(drafter: str, tilt: float) -> None:
    """Also for drafters that are surer, or less sure, than they should be, though learning that takes a while."""
    compared = depth.mean_of([depth.compare(mix(seed, tilt), drafter, box(), seed) for seed in range(2)])
    against = compared["against"]
    assert against["mix"]["ratio"] >= 1.1
    assert min(row["ratio"] for kind, row in against.items() if kind != "random") >= (0.97 if tilt else 0.98)
    assert against["random"]["over_no_drafting"] >= 0.98


def test_the_same_comparison_notices_a_bad_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that verifies all it is given loses on random text, and one that never drafts loses on the others."""
    cut = DepthController.cut
    for depths in (lambda drafts: [len(draft) for draft in drafts], lambda drafts: [0] * len(drafts)):

        def bad(self, drafts, depths=depths):
            cut(self, drafts)
            self._step.depths = depths(drafts)
            return self._step.depths

        monkeypatch.setattr(DepthController, "cut", bad)
        against = depth.compare(mix(0), "dflash", box(), 0)["against"]
        assert min(row["ratio"] for row in against.values()) < 0.95


def test_requests_side_by_side_gain_too_and_emit_the_same_tokens() -> None:
    texts = mix(3)
    for row in depth.batches(texts, "dflash", box()):
        assert row["ratio"] >= 1.0
    for together in (1, 3, 8):
        outcomes = replay.run(texts, Strategy("mtp", None, box()), together=together)
        assert {kind: o.tokens for kind, o in outcomes.items()} == dict.fromkeys(KINDS, 5 * 250)


def test_a_drafter_that_is_not_asked_costs_next_to_nothing() -> None:
    """Falling behind and catching up, with nothing ever drafted."""
    texts = [synthetic("random", 400, random.Random(1), 0.0)]
    alone = replay.run(texts, Strategy("", 0, box()))["random"].tokens_per_s
    for drafter in ("mtp", "dflash"):
        assert replay.run(texts, Strategy(drafter, None, box()))["random"].tokens_per_s > 0.98 * alone


def test_a_trimmed_draft_head_makes_drafting_cheaper_on_the_clock() -> None:
    whole = box()
    trimmed = replace(whole, weights=replace(whole.weights, draft_vocab=47_000))
    assert trimmed.draft_s("mtp", 2) < 0.5 * whole.draft_s("mtp", 2)
    assert trimmed.verify_s(8) == whole.verify_s(8)


# -- traces


def test_overlap_of_routing_is_carried_over_from_few_experts_to_many() -> None:
    tokens = np.arange(1, 13)
    independent = 16 * (1 - 0.75**tokens)
    assert replay.as_on_spark(independent[None], 16, 4)[0] == pytest.approx(256 * (1 - (31 / 32) ** tokens), rel=0.02)
    same = np.full((1, 12), 4.0)  # every token chooses the same experts
    assert replay.as_on_spark(same, 16, 4)[0] == pytest.approx(8.0)
    assert np.all(replay.as_on_spark(np.full((1, 4), 16.0), 16, 4)[0] <= 256 * (1 - (31 / 32) ** tokens[:4]) + 1e-9)


def test_what_was_recorded_is_what_is_replayed(tmp_path: Path) -> None:
    task = traces.Task("json", [1, 2], Sampling(), 6)
    output = [5, 6, 7, 8, 9]
    drafts = [
        Draft([6, 7, 1], [0.9, 0.8, 0.5], "mtp"),
        Draft([7], [0.99], "mtp"),
        Draft(),
        Draft([3, 9], [0.2, 0.1], "mtp"),
        Draft(),
    ]
    distinct = [[4.0, 6.0, 8.0, 9.0], [4.0, 5.0], [4.0], [4.0, 7.0, 8.0], [4.0]]
    sequence = traces._Sequence(task, 0, [0], output, {"mtp": drafts}, {"mtp": distinct}, done=True)
    path = tmp_path / "traces.npz"
    np.savez_compressed(path, **traces.pack([sequence], 16, 4))  # type: ignore[arg-type]
    (text,) = replay.load(path)
    assert (text.kind, len(text)) == ("json", 4)
    blocks = text.blocks["mtp"]
    assert [(len(block.sure), block.right) for block in blocks] == [(3, 2), (1, 1), (0, 0), (2, 0)]
    assert blocks[0].sure == pytest.approx([0.9, 0.8, 0.5], abs=0.02)
    assert blocks[0].distinct[0] == pytest.approx(8.0)
    assert blocks[0].distinct == sorted(blocks[0].distinct)
    draft = blocks[0].draft(0, "mtp", 8)
    assert draft.tokens == [1, 2, replay.WRONG]


def test_a_chart_shows_every_text(tmp_path: Path) -> None:
    path = tmp_path / "chart.svg"
    chart.write(path, "a & b", {"json": ([(0, 30.0), (2, 50.0)], 55.0), "mix": ([(0, 30.0), (2, 40.0)], 41.0)}, "note")
    written = path.read_text(encoding="utf-8")
    assert written.startswith("<svg")
    assert "a &amp; b" in written
    assert "adaptive 55.0, 1.10 x best fixed" in written
