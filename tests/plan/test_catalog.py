"""Names: what is known, what is near, and what a config.json lacks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.cards import Card
from stoker.errors import ConfigError, RequestError
from stoker.plan.answer import Question, answer, parse_draft
from stoker.plan.catalog import boxes, find_box, find_model, find_scheme, models
from stoker.plan.compat import Finding, Rule, findings, rules
from stoker.plan.machine import box_of, this_machine
from stoker.plan.memory import find_engine
from stoker.sizes.step import Draft

MIB = 1 << 20
RTX_5090 = Card("NVIDIA GeForce RTX 5090", 32607 * MIB, 31800 * MIB)
GB10 = Card("NVIDIA GB10", 0, 0)  # which reports no memory of its own
MEMORY = (127_600_000 * 1024, 115_343_360 * 1024)  # total and available


def test_every_box_and_model_the_documents_name() -> None:
    assert {box.key for box in boxes()} >= {
        "spark", "2xspark", "strix-halo", "dual-r9700", "dual-w7900", "rtx-5090", "rtx-pro-6000", "h100", "h200"
    }  # fmt: skip
    assert {model.name for model in models()} >= {
        "Qwen3.5-122B-A10B", "Qwen3.5-35B-A3B", "Qwen3.5-397B-A17B", "Qwen3.6-35B-A3B", "Qwen3.6-27B",
        "Qwen3-30B-A3B", "Qwen3-235B-A22B", "gpt-oss-120b",
    }  # fmt: skip
    for box in boxes():
        assert 0 < box.achievable_gb_s < box.bandwidth_gb_s, box.key
        assert 0 < box.usable_gib <= box.visible_gib, box.key
        assert box.source, box.key


@pytest.mark.parametrize("name", ["122b", "Qwen/Qwen3.5-122B-A10B", "qwen3.5_122b_a10b", "QWEN3.5-122B"])
def test_a_model_has_many_names(name: str) -> None:
    assert find_model(name).name == "Qwen3.5-122B-A10B"


@pytest.mark.parametrize(
    ("find", "name", "near"),
    [
        (find_model, "qwen3.5-112b", "Qwen3.5-122B-A10B"),
        (find_model, "gpt-oss-210b", "gpt-oss-120b"),
        (find_box, "sprak", "spark"),
        (find_box, "rtx-5900", "rtx-5090"),
        (find_scheme, "nvpf4", "nvfp4"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(find, name: str, near: str) -> None:
    with pytest.raises(RequestError, match="Did you mean") as error:
        find(name)
    assert near in str(error.value).split("Known:")[0]


def test_a_model_that_is_only_evidence_leads_to_it() -> None:
    with pytest.raises(RequestError, match=r"stoker evidence gemma-4-26B-A4B-it lists \d+ rows"):
        find_model("gemma-4-26B-A4B-it")


def test_engines_and_drafts_are_named_in_errors() -> None:
    assert find_engine("llama.cpp").key == find_engine("LLAMACPP").key == "llama.cpp"
    with pytest.raises(RequestError, match=r"vLLM, llama\.cpp"):
        find_engine("tgi")
    assert parse_draft("mtp:2") == Draft("mtp", 2)
    for wrong in ("eagle:3", "mtp", "mtp:0", "mtp:x", "mtp:65"):
        with pytest.raises(RequestError, match="--draft"):
            parse_draft(wrong)


def test_a_config_of_another_architecture_says_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma4", "hidden_size": 2048}))
    with pytest.raises(ConfigError, match=r"'gemma4'.*lacks num_hidden_layers, num_attention_heads, vocab_size"):
        find_model(str(path))
    path.write_text(json.dumps({"model_type": "qwen3_5_moe", "hidden_size": 2048}))
    with pytest.raises(ConfigError, match="num_hidden_layers is missing"):
        find_model(str(path))


def test_a_config_json_alone_is_enough_to_plan(tmp_path: Path) -> None:
    model = find_model("30b")
    config = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1e6,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = answer(Question(str(tmp_path / "config.json"), "spark", weights="fp8"))
    assert found.model.parameters == model.parameters
    assert found.fits


def test_a_format_that_stores_nothing_of_a_model_is_refused() -> None:
    with pytest.raises(RequestError, match="stores nothing of gpt-oss-120b"):
        answer(Question("gpt-oss-120b", "spark", weights="int4"))


def test_this_machine_with_a_card_with_unified_memory_and_with_neither() -> None:
    card = box_of(*MEMORY, [RTX_5090])
    assert (card.bandwidth_gb_s, card.unified, round(card.visible_gib, 1)) == (1792, False, 31.8)
    spark = box_of(*MEMORY, [GB10])
    assert (spark.architecture, spark.unified, round(spark.usable_gib)) == ("sm_121", True, 110)
    cpu = box_of(*MEMORY, [])
    assert (cpu.architecture, cpu.unified) == ("cpu", True)
    assert "assumed" in cpu.source
    assert cpu.reserve_gib >= cpu.visible_gib - cpu.usable_gib
    pair = box_of(*MEMORY, [RTX_5090] * 2)
    assert (pair.devices, round(pair.visible_gib, 1)) == (2, 63.7)
    with pytest.raises(RequestError, match="name a box"):
        box_of(0, 0, [])
    assert this_machine().visible_gib > 0


def test_conflicting_evidence_is_shown_as_conflicting() -> None:
    found = {f.topic: f for f in findings(find_box("spark"), find_model("122b"), "nvfp4", Draft("mtp", 2), "vLLM")}
    assert found["CUTLASS FP4 MoE kernels"].verdict == "conflicting"
    assert {rule.source for rule in found["CUTLASS FP4 MoE kernels"].standing} >= {"document 001", "document 004"}
    # what was superseded no longer conflicts, but is still listed
    settled = found["MTP with prefix caching"]
    assert settled.verdict == "works"
    assert len(settled.rules) == 2
    assert "CUTLASS FP4 MoE kernels" not in {
        f.topic for f in findings(find_box("h200"), find_model("122b"), "nvfp4", Draft(), "vLLM")
    }


def test_a_superseded_rule_alone_is_no_verdict() -> None:
    rule = Rule("a", "t", "any", ("*",), False, "s", "e", "2026", "d")
    assert Finding("t", (rule,)).verdict == "does not work"
    ids = {rule.id for rule in rules()}
    assert {rule.superseded_by for rule in rules()} - {""} <= ids


def test_vllm_on_a_processor_does_not_take_what_it_takes_of_a_card() -> None:
    box, needs = find_box("spark"), find_engine("vLLM")
    assert needs.on(box) == needs
    here = needs.on(replace(box, architecture="cpu"))
    assert here.runtime_gib + here.host_gib < 2 < needs.runtime_gib + needs.host_gib
