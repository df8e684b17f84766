"""The ten traps a loader of this model family can step into, in order of damage; each test fails if we do.

Where transformers computes the same, it is the judge: right means a relative logit error of at most 2e-5, and the
trap itself, tried on purpose, must lie at least a thousandfold above that.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from stoker.backends.family import PAGE_SIZE, Family
from stoker.backends.network.attention import rope_table
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.cache import Cache
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.deltanet import DeltaState
from stoker.backends.network.load import load_drafter, load_model
from stoker.errors import CheckpointError
from stoker.weights.checkpoint import INDEX
from stoker.weights.formats.int4 import Int4
from stoker.weights.formats.nvfp4 import Nvfp4, Nvfp4ModelOpt
from stoker.weights.formats.rules import formats_in
from stoker.weights.model_config import ModelConfig
from tests.backends.network import plain
from tests.backends.network.drive import DFlashDrive, MtpDrive, page_table, random_tokens, run_trunk
from tests.support.random_checkpoint import (
    small_config,
    small_drafter_config,
    write_random_checkpoint,
    write_random_drafter,
)

TOLERANCE = 2e-5
NOTICED = 1000 * TOLERANCE
TOKENS = random_tokens(151)
PROMPT, FOLLOWING = TOKENS[:-1], TOKENS[1:]
CONFIG = small_config("qwen3_5_moe_text")


@dataclass(frozen=True)
class Truth:
    directory: Path
    logits: Tensor  # transformers', [T, vocab]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    directory = tmp_path_factory.mktemp("trunk")
    write_random_checkpoint(directory, CONFIG)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return Truth(directory, reference(torch.tensor([PROMPT])).logits[0])


def logits_of(model: Decoder) -> Tensor:
    return model.logits(run_trunk(model, PROMPT)[0], Family.PREFILL)


def error_of(
    truth: Truth, damage: Callable[[str, Tensor], Tensor] | None = None, directory: Path | None = None
) -> float:
    """Stoker's largest relative logit error, with some of its weights changed on purpose by `damage(name, w)`."""
    model = load_model(directory or truth.directory, dtype=torch.float32).model
    for name, parameter in model.named_parameters():
        if damage is not None:
            parameter.data = damage(name, parameter.data)
    return plain.relative_error(logits_of(model), truth.logits)


def plus_one(norm: str) -> Callable[[str, Tensor], Tensor]:
    """The other kind of norm, in one place."""
    return lambda name, w: w + 1 if name == norm else w


def test_trap_01_norm_offsets(truth: Truth, tmp_path: Path) -> None:
    """1 + w in trunk and MTP head, plain w in the DeltaNet norm and in the drafter."""
    assert error_of(truth) <= TOLERANCE
    layers = "layers.{}.{}.weight"
    for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
        assert error_of(truth, plus_one(layers.format(3, norm))) >= NOTICED, norm
    assert error_of(truth, plus_one(layers.format(0, "linear_attn.norm"))) >= NOTICED
    assert error_of(truth, plus_one("norm.weight")) >= NOTICED

    right, wrong = mtp_errors(truth.directory, factor=plain.itself)
    assert right <= 1e-5
    assert wrong >= 1e-2

    config = small_drafter_config(CONFIG)
    write_random_drafter(tmp_path, config)
    trunk = load_model(truth.directory, dtype=torch.float32).model
    drive = DFlashDrive(load_drafter(tmp_path, trunk.config, dtype=torch.float32), trunk)
    _, features = run_trunk(trunk, PROMPT, taps=drive.drafter.config.taps)
    drive.observe(Family.PREFILL, {0: features})
    found = drive.propose({0: TOKENS[-1]})[0]
    block = trunk.embed_tokens.weight[torch.tensor([TOKENS[-1]] + [config["dflash_config"]["mask_token_id"]] * 7)]
    for factor, noticed in ((plain.itself, False), (plain.one_plus, True)):
        taps = list(features.split(CONFIG["hidden_size"], dim=-1))
        causal = {"sliding_attention": True, "full_attention": False}
        tensors = plain.load_tensors(tmp_path)
        expected = plain.dflash_block(tensors, config, taps, block, causal=causal, factor=factor)
        error = plain.relative_error(found, expected)
        assert error >= 1e-2 if noticed else error <= 1e-5


def test_trap_02_query_and_gate_interleave_per_head(truth: Truth) -> None:
    """q_proj holds query and gate of head 0, then of head 1, ...; not all queries and then all gates."""

    def all_queries_first(name: str, w: Tensor) -> Tensor:
        if not name.endswith("q_proj.weight"):
            return w
        heads, dim = CONFIG["num_attention_heads"], CONFIG["head_dim"]
        return w.view(heads, 2, dim, -1).transpose(0, 1).reshape(w.shape)

    assert error_of(truth) <= TOLERANCE
    assert error_of(truth, all_queries_first) >= NOTICED


def mtp_errors(directory: Path, **mistake: Any) -> tuple[float, float]:
    """Distance of Stoker's MTP head from the plain computation, and from one with a mistake in it."""
    model = load_model(directory, dtype=torch.float32).model
    hidden, before_norm = run_trunk(model, PROMPT, taps=[CONFIG["num_hidden_layers"] - 1])
    found = MtpDrive(model).feed_chunks(Family.PREFILL, FOLLOWING, hidden, len(FOLLOWING))
    tensors, ids, positions = plain.load_tensors(directory), torch.tensor(FOLLOWING), torch.arange(len(FOLLOWING))
    wrong_hidden = before_norm if mistake.pop("pre_norm", False) else hidden
    right = plain.mtp_head(tensors, CONFIG, hidden, ids, positions)
    wrong = plain.mtp_head(tensors, CONFIG, wrong_hidden, ids, positions, **mistake)
    return plain.relative_error(found, right), plain.relative_error(found, wrong)


@pytest.mark.parametrize("mistake", [{"pre_norm": True}, {"hidden_first": True}], ids=["pre-norm", "hidden-first"])
def test_trap_03_mtp_takes_the_post_norm_hidden_and_the_embedding_first(truth: Truth, mistake: dict[str, bool]) -> None:
    right, wrong = mtp_errors(truth.directory, **mistake)
    assert right <= 1e-5
    assert wrong >= 1e-2


def test_trap_04_int4_scales_are_signed_and_the_zero_point_is_8() -> None:
    """w = scale * (nibble - 8) with scales of either sign, although qzeros hold 7."""
    n_in, n_out = 64, 8
    codes = torch.randint(0, 16, (n_in, n_out), generator=torch.Generator().manual_seed(0))
    scales = torch.linspace(-0.5, 0.5, 2 * n_out).view(2, n_out).half()  # groups of 32 inputs
    words = torch.zeros(n_in // 8, n_out, dtype=torch.int64)
    for i in range(n_in):
        words[i // 8] += codes[i] << 4 * (i % 8)
    stored = {
        "qweight": torch.where(words >= 1 << 31, words - (1 << 32), words).int(),
        "scales": scales,
        "qzeros": torch.full((2, 1), 0x77777777, dtype=torch.int32),
    }
    weight = Int4.from_tensors(stored, "layer").dequantize()
    for out in range(n_out):
        for i in range(n_in):
            assert weight[out, i] == scales[i // 32, out].float() * (codes[i, out] - 8)
    with pytest.raises(CheckpointError, match="0x88888888"):  # zero point 9, or another dialect: not to be guessed
        Int4.from_tensors(stored | {"qzeros": torch.full((2, 1), 0x88888888 - (1 << 32), dtype=torch.int32)}, "layer")


def test_trap_05_nvfp4_global_scale_divides_in_one_dialect_and_multiplies_in_the_other() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)  # [out, in/2]: every pair of values
    local = torch.linspace(0.5, 4.0, 32).view(16, 2).to(torch.float8_e4m3fn)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor(values + [-v for v in values])
    e2m1 = torch.stack([table[(codes & 15).int()], table[(codes >> 4).int()]], dim=-1).flatten(1)  # low nibble first
    expected = e2m1 * local.float().repeat_interleave(16, dim=1) / 4.0
    divides = {"weight_packed": codes, "weight_scale": local, "weight_global_scale": torch.tensor([4.0])}
    multiplies = {"weight": codes, "weight_scale": local, "weight_scale_2": torch.tensor(0.25)}
    assert torch.equal(Nvfp4.from_tensors(divides, "layer").dequantize(), expected)
    assert torch.equal(Nvfp4ModelOpt.from_tensors(multiplies, "layer").dequantize(), expected)


def test_trap_06_every_expert_layout_gives_the_same_model(truth: Truth, tmp_path: Path) -> None:
    """Fused or one by one, in trunk and MTP head alike; fused means all gate rows, then all up rows."""
    models = {}
    for per_expert in [(), ("layers.",), ("mtp.",), ("layers.", "mtp.")]:
        directory = tmp_path / "-".join(("layout", *per_expert))
        write_random_checkpoint(directory, CONFIG, per_expert=per_expert)
        names = plain.load_tensors(directory).keys()
        assert ("model.layers.0.mlp.experts.gate_up_proj" in names) == ("layers." not in per_expert)
        assert ("mtp.layers.0.mlp.experts.0.up_proj.weight" in names) == ("mtp." in per_expert)
        models[per_expert] = load_model(directory, dtype=torch.float32).model
    fused = models[()]
    for model in models.values():
        for (name, ours), theirs in zip(fused.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs), name
        assert torch.equal(logits_of(model), logits_of(fused))
    assert plain.relative_error(logits_of(fused), truth.logits) <= TOLERANCE

    def interleaved(name: str, w: Tensor) -> Tensor:  # gpt-oss: even rows gate, odd rows up
        return w.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) if name.endswith("gate_up_proj") else w

    assert error_of(truth, interleaved) >= NOTICED


def test_trap_07_the_format_of_in_proj_a_is_read_off_the_header() -> None:
    """INT4 in one release and 16 bit in the next under the same config; shape [heads, hidden] either way."""
    module = "model.language_model.layers.0.linear_attn.in_proj_a"
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int"}
    packed = {
        f"{module}.qweight": ("I32", (384, 64)),
        f"{module}.qzeros": ("I32", (24, 8)),
        f"{module}.scales": ("F16", (24, 64)),
    }
    for header, expected in ((packed, "int4-g128"), ({f"{module}.weight": ("BF16", (64, 3072))}, "bf16")):
        table = formats_in(header, settings)
        assert not table.errors
        layer = table.layers[module]
        assert layer.format == expected
        assert layer.shape == (64, 3072)


def test_trap_08_an_mtp_head_missing_from_the_index_is_loaded(truth: Truth, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, CONFIG)
    index = json.loads((tmp_path / INDEX).read_text())
    listed = {name: file for name, file in index["weight_map"].items() if not name.startswith("mtp.")}
    missing = len(index["weight_map"]) - len(listed)
    (tmp_path / INDEX).write_text(json.dumps(index | {"weight_map": listed}))
    loaded, whole = load_model(tmp_path), load_model(truth.directory)
    assert loaded.model.mtp is not None
    assert whole.model.mtp is not None
    for (name, ours), theirs in zip(loaded.model.mtp.named_parameters(), whole.model.mtp.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    [note] = [note for note in loaded.notes if "index" in note]
    assert str(missing) in note
    assert "model_extra_tensors.safetensors" in note
    assert not [note for note in whole.notes if "index" in note]


def test_trap_09_what_must_stay_fp32_does_in_a_bf16_model(truth: Truth, tmp_path: Path) -> None:
    """A_log, the DeltaNet norm, the recurrent state and the rope frequencies; also where the file has them in bf16."""
    loaded = load_model(truth.directory)
    model, stored = loaded.model, plain.load_tensors(truth.directory)
    assert model.embed_tokens.weight.dtype == torch.bfloat16
    kept = [n for n, _ in model.named_parameters() if n.endswith(("A_log", "linear_attn.norm.weight"))]
    assert len(kept) == 2 * len(loaded.config.linear_layers)
    for name in kept:
        assert torch.equal(model.get_parameter(name), stored[f"model.{name}"])  # fp32, not a rounded bf16
        assert not torch.equal(stored[f"model.{name}"], stored[f"model.{name}"].bfloat16().float())

    cache = Cache.allocate(loaded.config, pages=8, slots=1)
    model(Batch.of(Family.PREFILL, [Run(PROMPT, 0, 0, page_table(0))], PAGE_SIZE), cache)
    states = [layer.recurrent for layer in cache.layers if isinstance(layer, DeltaState)]
    assert len(states) == len(loaded.config.linear_layers)
    for state in states:
        assert state.dtype == torch.float32
        assert not torch.equal(state, state.bfloat16().float())

    for bits in (torch.bfloat16, torch.float32):
        before = torch.get_default_dtype()
        torch.set_default_dtype(bits)
        try:
            cosines, _ = rope_table(torch.tensor([200_003]), 1e7, 64)
        finally:
            torch.set_default_dtype(before)
        exact = (200_003 * 1e7 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)).cos()
        assert cosines.dtype == torch.float32
        assert (cosines[0] - exact).abs().max() < 0.05  # a bf16 frequency would be radians off

    write_random_checkpoint(tmp_path, CONFIG, shards=1)
    file = tmp_path / "model-00001-of-00001.safetensors"
    save_file({name: values.bfloat16() for name, values in load_file(file).items()}, file)  # as Qwen3.6 stores them
    for name in kept:
        assert load_model(tmp_path).model.get_parameter(name).dtype == torch.float32


def test_trap_10_both_files_name_stop_ids(tmp_path: Path) -> None:
    """config.json knows only the end of text; the end of a turn stands in generation_config.json."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": 248044}))
    assert ModelConfig.load(tmp_path).eos_token_ids == (248044,)
    for listed in ([248046, 248044], [248046], 248046):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
        assert set(ModelConfig.load(tmp_path).eos_token_ids) == {248044, 248046}
        assert len(ModelConfig.load(tmp_path).eos_token_ids) == 2
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True}))
    assert ModelConfig.load(tmp_path).eos_token_ids == (248044,)
    multimodal = {"model_type": "qwen3_5_moe", "text_config": CONFIG | {"eos_token_id": 248044}}
    (tmp_path / "config.json").write_text(json.dumps(multimodal))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [248046, 248044]}))
    assert set(ModelConfig.load(tmp_path).eos_token_ids) == {248044, 248046}
