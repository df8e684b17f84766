"""Names: what is known, what is near, and what a config.json lacks."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


@pytest.mark.parametrize(
    ("name", "total", "active"),  # billions, as published
    [
        ("gemma-4-26B-A4B-it", 25.2, 3.8),
        ("DeepSeek-V4-Flash", 284.3, 13.8),
        ("GLM-4.7-Flash", 29.9, 3.9),
        ("glm-4.5-air", 106.9, 13.4),
        ("MiniMax-M2", 228.7, 11.0),
        ("mistral-small-4", 119.0, 6.6),
        ("Ling-3.0-flash", 124.0, 5.1),  # by its size alone
    ],
)
def test_models_of_other_families_are_planned_too(name: str, total: float, active: float) -> None:
    model = find_model(name)
    assert model.parameters / 1e9 == pytest.approx(total, abs=0.06)
    assert model.active_parameters / 1e9 == pytest.approx(active, abs=0.06)
    found = answer(Question(name, "2x spark"))
    assert found.budget.total > 0
    assert found.speed.low <= found.speed.tokens_per_s <= found.speed.high


def test_tables_of_n_grams_are_held_in_memory_and_not_read() -> None:
    model = find_model("Qwen3.8-Flash-Next")
    assert model.parameters / 1e9 == pytest.approx(177, abs=0.5)
    assert (model.active_parameters - model.looked_up_parameters) / 1e9 == pytest.approx(6, abs=0.8)


def test_what_is_known_by_its_size_alone_says_so() -> None:
    assert "caches are not counted" in find_model("Ling-3.0-flash").note
    assert find_model("DeepSeek-V4-Flash").note == ""


@pytest.mark.parametrize(
    ("name", "key"),
    [("q4", "ud-q4_k"), ("gguf-q4", "ud-q4_k"), ("Q4_K_M", "q4_k"), ("q8", "q8_0"), ("awq", "int4"), ("mxfp4", "mxfp4"),
     ("GPTQ", "gptq-int4"), ("fp16", "bf16"), ("gguf:3.5", "gguf:3.5")],
)  # fmt: skip
def test_formats_have_the_names_that_people_type(name: str, key: str) -> None:
    assert find_scheme(name).key == key


def test_a_gguf_format_means_llama_cpp_and_its_mxfp4_is_another() -> None:
    assert answer(Question("122b", "spark", weights="q4")).ask.engine == "llama.cpp"
    assert answer(Question("gpt-oss-120b", "strix-halo", weights="mxfp4")).weights_key == "mxfp4-gguf"
    assert answer(Question("gpt-oss-120b", "h100", weights="mxfp4")).weights_key == "mxfp4"


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
    with pytest.raises(ConfigError, match="num_hidden_layers is missing"):
        find_model(str(path))
    path.write_text(json.dumps({"model_type": "novelty", "hidden_size": 2048}))
    with pytest.raises(ConfigError, match=r"'novelty'.*num_hidden_layers, num_attention_heads, vocab_size lack"):
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


def test_an_unknown_family_is_counted_as_a_plain_transformer_and_says_so(tmp_path: Path) -> None:
    config = {
        "model_type": "novelty", "hidden_size": 4096, "num_hidden_layers": 34, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 131072,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = answer(Question(str(tmp_path / "config.json"), "spark"))
    assert found.model.parameters / 1e9 == pytest.approx(8.5, abs=0.1)
    assert "counted as a plain transformer" in found.model.note
    assert found.weights_key == "fp8"
    assert found.budget.sum_of("KV") == 34 * 2 * 8 * 128 * 2 * found.ask.context


def test_a_repository_of_the_hub_is_planned_from_its_config_alone(tmp_path: Path) -> None:
    config = {
        "model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96,
        "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 128, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "intermediate_size": 10944, "first_k_dense_replace": 1,
        "vocab_size": 151552, "max_position_embeddings": 131072, "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            found = self.path == "/somebody/New-Model/resolve/main/config.json"
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(json.dumps(config).encode() if found else b"")

        def log_message(self, *_: object) -> None:
            pass

    code = (
        "import sys; from stoker.plan.catalog import find_model as f; m = f(sys.argv[1]); print(m.name, m.parameters)"
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
        there, gone = (
            subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, env=env, check=False)
            for name in ("somebody/New-Model", "hf:somebody/Nothing")
        )
        server.shutdown()
    assert there.stdout.split() == ["New-Model", str(find_model("glm-4.5-air").parameters)]
    assert "could not be fetched from the hub (HTTP Error 404" in gone.stderr
    assert len(asked) == 2


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
