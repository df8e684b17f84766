"""Whether a recipe fits is the planner's answer, with the numbers, whatever of it the recipe names."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker.plan.catalog import GIB, find_model, find_scheme
from stoker.recipes.load import Loaded, load, parse
from stoker.sizes.weights import WeightBytes
from stoker.up import build
from stoker.up.planning import DoesNotFit, box_of, nearest_scheme, plan

SHAPE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
}


def loaded(folder: Path, text: str = "", source: str = "hf:owner/model") -> Loaded:
    text = f'name = "mine"\ntitle = "t"\n{text}\n[model]\nsource = "{source}"\n'
    return Loaded(parse(text), folder, text)


def test_what_the_recipe_names_is_planned_on_the_box_that_was_named(tmp_path):
    found = plan(load("qwen3.5-122b-nvfp4-mtp2"), "spark")
    assert found.answer
    assert found.answer.fits
    assert found.memory_bytes == int(0.9 * found.box.visible_bytes) + 5 * GIB, "vLLM takes its share"
    prose, code = (found.predict(name, 1) for name in ("Q&A", "Code"))
    assert prose
    assert code
    assert prose.tokens_per_s < code.tokens_per_s < prose.limit * 2
    four = found.predict("uniform_short", 4)
    assert four
    assert four.tokens_per_s > prose.tokens_per_s


def test_too_much_is_refused_with_numbers_and_a_way_out(tmp_path):
    large = 'plan = "122b"\nweights = "int4"\nserve = { context = 262144, users = 16 }'
    with pytest.raises(DoesNotFit, match=r"GiB are needed and 121\.7 are there.*KV cache.*lower serve\.context"):
        plan(loaded(tmp_path, large), "spark")
    with pytest.raises(DoesNotFit, match=r"stoker pick --box spark"):
        plan(loaded(tmp_path, 'plan = "122b"\nweights = "bf16"'), "spark")
    with pytest.raises(DoesNotFit) as raised:
        plan(loaded(tmp_path, 'plan = "122b"\nweights = "int4"'), "rtx-5090")
    assert raised.value.planned.answer
    assert not raised.value.planned.answer.fits


def machine(monkeypatch, available):
    """This machine has 16 GiB and no card, and so many GiB are available."""
    found = psutil.virtual_memory()._replace(total=16 * GIB, available=available * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: found)
    monkeypatch.setattr("stoker.plan.machine.nvidia_cards", list)


def test_memory_that_an_older_engine_gives_back_counts(tmp_path, monkeypatch):
    recipe = loaded(tmp_path, 'plan = "demo"', "demo")
    machine(monkeypatch, 12)
    before = plan(recipe, "this")
    after = plan(recipe, "this", freed=1 * GIB)
    assert before.answer
    assert after.answer
    gained = after.answer.budget.free_bytes - before.answer.budget.free_bytes
    assert gained == pytest.approx(GIB, rel=0.1)


def test_what_other_programs_use_is_told_apart_from_what_the_recipe_needs(tmp_path, monkeypatch):
    machine(monkeypatch, 2)
    with pytest.raises(DoesNotFit, match=r"other programs and what stays free 15\.\d.*end some of them"):
        plan(loaded(tmp_path, 'plan = "demo"', "demo"), "this")


def test_files_tell_what_the_recipe_does_not(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))
    found = plan(loaded(tmp_path, 'weights = "fp8"', "model"), "spark")
    assert found.answer
    assert found.answer.model.layers == 48
    (tmp_path / "model" / "config.json").write_text('{"model_type": "mystery"}')
    found = plan(loaded(tmp_path, 'weights = "fp8"', "model"), "spark")
    assert found.answer is None
    assert "not planned" in found.note
    assert "mystery" in found.note


@pytest.mark.parametrize("scheme", ["bf16", "fp8", "int4", "nvfp4-experts"])
def test_a_format_is_known_by_its_bytes(scheme):
    model = find_model("122b")
    size = WeightBytes.of(model, find_scheme(scheme)).total
    name, near = nearest_scheme("122b", size)
    assert near
    assert WeightBytes.of(model, find_scheme(name)).total == size
    assert not nearest_scheme("122b", 40 * size)[1]


def test_a_hub_is_asked_for_the_config_alone(tmp_path, monkeypatch):
    from tests.support.stand_in_hub import StandInHub
    from tests.up.test_fetch import point_at

    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "hub" / "model.safetensors").write_bytes(b"0" * 1000)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with StandInHub(tmp_path / "hub").running() as hub:
        point_at(hub.endpoint, monkeypatch)
        monkeypatch.setattr("stoker.weights.hub.Hub.cached_file", _into(tmp_path / "cache"))
        found = plan(loaded(tmp_path), "spark")
    assert found.answer
    assert "the format of the nearest size" in found.note
    assert not [path for path, *_ in hub.requests if "safetensors" in path]


def _into(cache: Path) -> Any:
    """The cache's place is read once, when huggingface_hub is imported."""
    from stoker.weights.hub import Hub

    given = Hub.cached_file
    return lambda self, name: given(self, name, cache)


def test_several_boxes_are_those_the_recipe_is_for():
    two = load("qwen3-235b-int4-2nodes").recipe
    assert (box_of(two, None), box_of(two, "spark"), box_of(load("demo").recipe, None)) == ("2xspark", "spark", "this")


def test_a_build_has_a_folder_by_what_goes_into_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "head").mkdir()
    recipe = loaded(tmp_path, 'build = { mtp = "head", lm_head = "int8", drafter = "hf:z/d" }')
    out = build.folder(recipe, Path("/base"), "c0ffee")
    assert out.parent == tmp_path / "cache" / "stoker" / "builds"
    assert out == build.folder(recipe, Path("/elsewhere"), "c0ffee"), "the same commit, wherever it lies"
    others = [
        build.folder(recipe, Path("/base"), "decaf"),
        build.folder(loaded(tmp_path, 'build = { lm_head = "int8" }'), Path("/base"), "c0ffee"),
    ]
    assert out not in others
    command = build.command(recipe, Path("/base"), out)
    assert command[command.index("--mtp") + 1] == str(tmp_path / "head"), "meant from the recipe's folder"
    assert command[command.index("--drafter") + 1] == "hf:z/d"
    assert command[command.index("--lm-head") + 1] == "int8"


def test_a_build_that_fails_says_so_and_one_that_is_whole_is_found(tmp_path):
    recipe = loaded(tmp_path, 'build = { lm_head = "int8" }')
    out = tmp_path / "out"
    with pytest.raises(build.BuildError, match="exit status 2"):
        build.run(recipe, tmp_path / "nothing", out)
    assert not build.is_built(out)
    out.mkdir()
    (out / "stoker.json").write_text("{}")
    assert build.is_built(out)
