"""Which tensor fills which parameter: in every published layout, and what is said of tensors that fill none."""

from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest

from stoker.errors import CheckpointError
from stoker.weights.checkpoint import Checkpoint
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.headers import ITEM_SIZES, TensorInfo
from stoker.weights.model_config import ModelConfig
from stoker.weights.names import EXPERTS, HEAD_WEIGHT, drafter_parameters, is_mtp, model_parameters, single_experts
from stoker.weights.problems import refuse_errors
from stoker.weights.resolve import Resolution, resolve_drafter, resolve_model
from tests.support import situations
from tests.support.random_checkpoint import small_config, small_drafter_config

Shape = tuple[int, ...]
CONFIG = ModelConfig.from_dict(small_config())
SOUND: list[Callable[..., object]] = [
    situations.bf16, situations.intel_int4, situations.int4_index_without_mtp, situations.int4_without_mtp,
    situations.qwen_fp8, situations.qwen_gptq, situations.nvfp4_modelopt, situations.nvfp4_compressed_tensors,
    situations.int4_compressed_tensors,
]  # fmt: skip


def headers(tensors: dict[str, Shape]) -> Checkpoint:
    """A checkpoint of BF16 tensors as it looks once its headers are read."""
    file = Path("model.safetensors")
    checkpoint = Checkpoint(Path("nowhere"))
    for name, shape in tensors.items():
        checkpoint.tensors[name] = TensorInfo(name, "BF16", shape, file, 0, prod(shape) * ITEM_SIZES["BF16"])
    return checkpoint


def published(
    config: ModelConfig, prefix: str = "model.", head: str = HEAD_WEIGHT, single: Callable[[str], bool] = is_mtp
) -> dict[str, Shape]:
    """The parameters of a network as a release calls them; `single` says where each expert has tensors of its own."""
    tensors: dict[str, Shape] = {}
    for name, shape in model_parameters(config).items():
        stored = head if name == HEAD_WEIGHT else name if is_mtp(name) else prefix + name
        tensors |= single_experts(stored, shape) if EXPERTS in stored and single(name) else {stored: shape}
    return tensors


def refusal(resolution: Resolution) -> str:
    with pytest.raises(CheckpointError) as caught:
        refuse_errors(resolution.problems(), Path("nowhere"))
    return str(caught.value)


def assert_whole(resolution: Resolution, config: ModelConfig) -> None:
    """Every parameter is filled, by layers that together have its shape, and every layer is accounted for once."""
    for name, shape in model_parameters(config).items():
        filling = resolution.fillings[name]
        if is_mtp(name) and not resolution.has_mtp:
            assert all(place.missing for place in filling.places)
            continue
        assert all(place.filled for place in filling.places), name
        assert sum(prod(layer.shape) for band in filling.layers for layer in band) == prod(shape), name
    taken = [place.module for place in resolution.places if place.layer]
    unused = [layer.name for unused in resolution.unused for layer in unused.layers]
    assert Counter(taken + unused) == Counter(list(resolution.checkpoint.formats.layers))
    assert not resolution.unknown


@pytest.mark.parametrize("vision", [True, False], ids=["multimodal", "text-only"])
@pytest.mark.parametrize("write", SOUND, ids=lambda write: write.__name__)
def test_every_release_is_resolved_whole(write: Callable[..., object], vision: bool, tmp_path: Path) -> None:
    write(tmp_path, vision=vision)
    config = ModelConfig.load(tmp_path)
    resolution = resolve_model(config, Checkpoint.open(tmp_path))
    assert_whole(resolution, config)
    assert [unused.what for unused in resolution.unused] == (["vision tensors"] if vision else [])
    assert not [problem for problem in resolution.problems() if problem.severity == "error"]


@pytest.mark.parametrize("single", [lambda name: True, lambda name: False, is_mtp], ids=["single", "fused", "mixed"])
@pytest.mark.parametrize("head", [HEAD_WEIGHT, "language_model.lm_head.weight"])
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model.", ""])
def test_every_spelling_is_found(prefix: str, head: str, single: Callable[[str], bool]) -> None:
    resolution = resolve_model(CONFIG, headers(published(CONFIG, prefix, head, single)))
    assert_whole(resolution, CONFIG)
    assert not resolution.problems()


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe"])
def test_every_family_is_found(family: str) -> None:
    config = ModelConfig.from_dict(small_config(family))
    assert_whole(resolve_model(config, headers(published(config, single=lambda name: True))), config)


def test_single_experts_fill_bands_of_rows_the_gates_above() -> None:
    filling = resolve_model(CONFIG, headers(published(CONFIG))).fillings["mtp.layers.0.mlp.experts.gate_up_proj"]
    assert filling.stacked
    gates, ups = filling.layers
    assert [layer.name for layer in gates[:2]] == [f"mtp.layers.0.mlp.experts.{i}.gate_proj" for i in (0, 1)]
    assert [layer.name for layer in ups[:2]] == [f"mtp.layers.0.mlp.experts.{i}.up_proj" for i in (0, 1)]
    assert [place.module for place in filling.places[:2]] == [gates[0].name, ups[0].name]  # as they are published


def test_missing_experts_are_missed_in_the_form_the_others_have() -> None:
    lost = "layers.1.mlp.experts.gate_up_proj"
    fused = published(CONFIG)
    del fused[f"model.{lost}"]
    assert f"first model.{lost} [8, " in refusal(resolve_model(CONFIG, headers(fused)))
    single = published(CONFIG, single=lambda name: True)
    single = {name: shape for name, shape in single.items() if not name.startswith("model.layers.1.mlp.experts.")}
    assert "first model.layers.1.mlp.experts.0.gate_proj.weight [" in refusal(resolve_model(CONFIG, headers(single)))


def test_without_an_embedding_the_layers_tell_the_prefix() -> None:
    tensors = published(CONFIG, "model.language_model.")
    del tensors["model.language_model.embed_tokens.weight"]
    missing = [place.name for place in resolve_model(CONFIG, headers(tensors)).places if place.missing]
    assert missing == ["model.language_model.embed_tokens.weight"]


def test_what_is_not_used_is_explained_by_its_rule() -> None:
    extra = {
        "model.visual.patch_embed.proj.weight": (4, 4),
        "visual.merger.weight": (4, 4),
        "model.layers.0.self_attn.rotary_emb.inv_freq": (8,),
        "model.layers.3.self_attn.k_proj.k_scale": (1,),
        "mtp.fc.weight": (4, 8),
        "lm_head.weight": (4, 4),
    }
    config = ModelConfig.from_dict(small_config(mtp_num_hidden_layers=0, tie_word_embeddings=True))
    resolution = resolve_model(config, headers(published(config) | extra))
    assert_whole(resolution, config)
    assert [str(unused) for unused in resolution.unused] == [
        "2 vision tensors not used: Stoker computes text only.",
        "1 rotary tables not used: they are computed.",
        "1 KV-cache scales not used: Stoker's cache has its own.",
        "1 MTP tensors not used: config.json has no MTP head (mtp_num_hidden_layers).",
        "1 head tensors not used: config.json ties the head to the embedding.",
    ]
    assert {problem.severity for problem in resolution.problems()} == {"note"}


def test_what_no_rule_explains_is_an_error_and_named() -> None:
    extra = {"model.layers.9.mlp.gate.weight": (4, 8), "surprise.weight": (3,)}
    resolution = resolve_model(CONFIG, headers(published(CONFIG) | extra))
    assert [layer.name for layer in resolution.unknown] == ["model.layers.9.mlp.gate", "surprise"]
    messages = [problem.message for problem in resolution.problems()]
    assert "1 unknown tensors have no place in this model, first surprise.weight [3] in BF16." in messages
    assert "first model.layers.9.mlp.gate.weight [4, 8] in BF16" in refusal(resolution)


def test_a_drafter_has_no_prefix_and_nothing_beside_it() -> None:
    config = DFlashConfig.from_dict(small_drafter_config(small_config()))
    shapes = drafter_parameters(config)
    assert not resolve_drafter(config, headers(shapes)).problems()
    assert "first extra.weight" in refusal(resolve_drafter(config, headers(shapes | {"extra.weight": (1,)})))
    short = {name: shape for name, shape in shapes.items() if name != "fc.weight"}
    assert "first fc.weight" in refusal(resolve_drafter(config, headers(short)))
