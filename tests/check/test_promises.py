"""A recipe's expected scores: a server that falls short is found, noise is not, and what was not asked is said."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from stoker.check import statistics
from stoker.check.promises import Promised, held, scores_of
from stoker.cli.main import app
from stoker.errors import BenchError
from stoker.recipes.load import RecipeError
from stoker.recipes.recipe import Score
from stoker.report.check import sentence
from tests.check.mock import KnowingServer, share
from tests.check.test_run import KNOWN, run

RECIPE = """
name = "mine"
title = "mine"
[model]
source = "demo"
[[expected.score]]
suite = "tools"
share = 0.95
items = 200
source = "measured here, 2026-11"
"""


def test_newcombes_interval_is_the_published_one():
    """Newcombe 1998, table II: 56/70 against 48/80 by method 10."""
    assert statistics.unpaired_share(56, 70, 48, 80) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    low, high = statistics.unpaired_share(10, 10, 20, 20)
    assert low < 0 < high, "where all are right there is room for a difference"


def test_a_server_that_falls_short_of_a_promise_is_found_and_noise_is_not():
    promised = Promised("mine", [Score("tools", 0.95, 200, "here"), Score("code", 0.9, 100, "here")])
    good = held(run(KnowingServer(KNOWN, share(0.07, "a"))), promised)
    assert [each.verdict for each in good.promises] == ["kept", "not asked"]
    assert "tools kept" in good.statement
    assert "points would not show" in good.statement
    assert "code not asked" in good.statement
    bad = held(run(KnowingServer(KNOWN, share(0.25, "a"))), promised)
    assert [each.verdict for each in bad.promises] == ["not kept", "not asked"]
    assert "tools not kept" in bad.statement
    assert sentence(bad) == "knows does not reach what mine promises on tools."


def test_a_promise_measured_on_few_items_accuses_nobody():
    few = Promised("mine", [Score("tools", 1.0, 5, "here")])
    assert held(run(KnowingServer(KNOWN, share(0.15, "a"))), few).promises[0].verdict == "kept"


def test_recipes_say_who_measured_a_score(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE)
    assert scores_of(str(path)) == Promised("mine", [Score("tools", 0.95, 200, "measured here, 2026-11")])
    path.write_text(RECIPE.replace('source = "measured here, 2026-11"\n', ""))
    with pytest.raises(RecipeError, match=r"mine\.toml, line 6 .*`source`"):
        scores_of(str(path))
    with pytest.raises(BenchError, match="expects no scores"):
        scores_of("qwen3.5-122b-int4")
    ran = CliRunner().invoke(app, ["check", "http://127.0.0.1:9", "--recipe", "qwen3.5-122b-int4"])
    assert "expects no scores" in str(ran.exception), "before anything is asked"
