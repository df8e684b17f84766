"""A promise is kept, not kept or not judged, and every line says beside what."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stoker.plan.catalog import GIB
from stoker.recipes.load import load, parse
from stoker.recipes.recipe import Recipe
from stoker.up.clients import KEY, settings
from stoker.up.measure import Measured, cells, left_out
from stoker.up.planning import plan
from stoker.up.promise import compare, verdict

TEXT = """\
name = "mine"
title = "t"
[model]
source = "demo"
[expected]
memory_gib = { value = 10, source = "m" }
start_s = { value = 100, source = "s" }
[[expected.speed]]
workload = "Q&A"
tokens_per_s = 100
tokens_per_step = 2.0
source = "a"
[[expected.speed]]
workload = "Code"
users = 4
tokens_per_s = 50
timing = "end-to-end"
source = "b"
[[expected.speed]]
workload = "Long-RAG-32K"
tokens_per_s = 90
source = "c"
"""


def recipe() -> Recipe:
    return parse(TEXT)


def row(workload: str, users: int, decode: float, whole: float, steps: float = 2.0) -> Measured:
    return Measured(workload, users, 2, 0, decode, whole, steps, 0.1)


@pytest.mark.parametrize(
    ("decode", "whole", "steps", "start", "memory", "broken"),
    [
        (91.0, 46.0, 1.85, 124.0, 10.9, []),
        (89.0, 46.0, 1.85, 124.0, 10.9, ["Q&A"]),
        (91.0, 44.0, 1.85, 124.0, 10.9, ["Code, 4 users, each, end to end"]),
        (91.0, 46.0, 1.7, 126.0, 11.1, ["Q&A, per step", "memory", "start"]),
    ],
)
def test_every_promise_has_its_limit(decode, whole, steps, start, memory, broken):
    rows = [row("Q&A", 1, decode, 1.0, steps), row("Code", 4, 1.0, whole)]
    lines = compare(recipe(), rows, start, int(memory * GIB), None, comparable=True)
    assert [line.what for line in lines if line.kept is False] == broken
    assert verdict(lines) is not bool(broken)
    (long,) = [line for line in lines if line.what == "Long-RAG-32K"]
    assert (long.measured, long.kept, long.source) == (None, None, "c"), "what was not measured is not judged"


def test_a_promise_whose_requests_all_fail_is_not_kept():
    failed = Measured("Q&A", 1, 2, 2, None, None, None, None)
    lines = compare(recipe(), [failed], 1.0, 0, None, comparable=True)
    assert [line.what for line in lines if line.kept is False] == ["Q&A"]


def test_what_a_slow_service_left_no_time_for_is_named():
    chosen = cells(recipe().expected.speed, 131072)
    done = [row("Q&A", 1, 1.0, 1.0), row("Code", 1, 1.0, 1.0), row("JSON-KIE", 1, 1.0, 1.0)]
    assert left_out(chosen, done) == "Code, 4 users not measured: the others took more than 120 s"
    assert left_out(chosen, [*done, row("Code", 4, 1.0, 1.0)]) == ""


def test_on_another_box_nothing_is_judged():
    lines = compare(recipe(), [row("Q&A", 1, 1.0, 1.0)], 900.0, 99 * GIB, None, comparable=False)
    assert verdict(lines) is None
    assert {line.measured for line in lines if line.what == "Q&A"} == {1.0}


def test_predictions_stand_beside_and_unpromised_workloads_too():
    loaded = load("qwen3.5-122b-nvfp4-mtp2")
    rows = [row("Q&A", 1, 25.0, 24.0), row("Math", 1, 30.0, 24.0), row("uniform_short", 4, 1.0, 15.9)]
    lines = {line.what: line for line in compare(loaded.recipe, rows, 1.0, 0, plan(loaded, "spark"), comparable=True)}
    assert lines["Q&A"].kept
    assert lines["uniform_short, 4 users, each, end to end"].kept
    assert lines["Math"].promised is None
    alone, shared = lines["Q&A"], lines["uniform_short, 4 users, each, end to end"]
    assert alone.predicted_low < alone.predicted < alone.predicted_high  # type: ignore[operator]
    assert shared.predicted < alone.predicted, "of each user"  # type: ignore[operator]


def test_short_workloads_that_are_promised_are_measured():
    speeds = load("qwen3.5-122b-nvfp4-mtp2").recipe.expected.speed
    chosen = {(cell.name, cell.concurrency) for cell in cells(speeds, 131072)}
    assert chosen == {(name, 1) for name in ("Q&A", "Code", "JSON-KIE", "Hungarian", "Long-RAG-8K")} | {
        ("uniform_short", 4)
    }
    assert {cell.name for cell in cells(speeds, 700)} == {"Q&A", "Code", "JSON-KIE", "Hungarian", "uniform_short"}
    agent = load("qwen3.5-122b-int4-mtp2").recipe.expected.speed
    assert [cell.histories for cell in cells(agent, 131072) if cell.name == "Agent"] == [(2000,)]
    assert not [cell for cell in cells(agent, 2048) if cell.name == "Agent"]


@pytest.mark.parametrize("key", [True, False])
def test_settings_can_be_pasted(key: bool, tmp_path: Path):
    found = settings("http://127.0.0.1:8000", "mine", 4096, key)
    assert list(found) == ["Claude Code", "Codex", "Qwen Code", "opencode", "Open WebUI"]
    codex: dict[str, Any] = tomllib.loads(found["Codex"])
    provider = codex["model_providers"][codex["model_provider"]]
    assert (codex["model"], codex["model_context_window"]) == ("mine", 4096)
    assert provider["base_url"] == "http://127.0.0.1:8000/v1"
    assert ("env_key" in provider) == key
    opencode = json.loads(found["opencode"].partition("\n")[2])["provider"]["stoker"]
    assert opencode["options"] == {"baseURL": "http://127.0.0.1:8000/v1", "apiKey": KEY if key else "none"}
    for program in ("Claude Code", "Qwen Code", "opencode", "Open WebUI"):
        assert "http://127.0.0.1:8000" in found[program]
        assert (KEY in found[program]) == key
