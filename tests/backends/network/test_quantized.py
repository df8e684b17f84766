"""A checkpoint in any storage format computes exactly what its dequantised values compute."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stoker.backends.family import Family
from stoker.backends.network.load import load_model
from stoker.errors import CheckpointError
from stoker.weights.checkpoint import INDEX, Checkpoint
from stoker.weights.formats import format_class
from stoker.weights.formats.int4 import Int4
from tests.backends.network.forward import new_cache, run_chunks
from tests.support.situations import (
    bf16,
    int4_compressed_tensors,
    intel_int4,
    nvfp4_compressed_tensors,
    nvfp4_modelopt,
    qwen_fp8,
    qwen_gptq,
    rewrite,
)

SITUATIONS: dict[str, Callable[..., None]] = {
    "int4-g32": intel_int4,
    "fp8-b128": qwen_fp8,
    "nvfp4-modelopt": nvfp4_modelopt,
    "nvfp4-ct": nvfp4_compressed_tensors,
    "int4-g64": partial(qwen_gptq, group=64),
    "int4-ct-g32": int4_compressed_tensors,
    "int4-ct-row": partial(int4_compressed_tensors, group=None),
}
TOKENS = torch.randint(0, 512, (90,), generator=torch.Generator().manual_seed(5)).tolist()


def logits(directory: Path, dtype: torch.dtype, family: Family) -> Tensor:
    model = load_model(directory, dtype=dtype).model
    return run_chunks(model, new_cache(model), TOKENS, [90], family)


def write_dequantised(source: Path, target: Path) -> None:
    """The same checkpoint with every weight spelt out in fp32, by hand: layer by layer, no quantization_config."""
    checkpoint = Checkpoint.open(source)
    stored = {name: t for file in source.glob("*.safetensors") for name, t in load_file(file).items()}
    tensors = {}
    for layer in checkpoint.formats.layers.values():
        values = {suffix: stored[name] for suffix, name in layer.tensors.items()}
        dense = format_class(layer.format).from_tensors(values, layer.name).dequantize()
        tensors[layer.name if layer.name in stored else f"{layer.name}.weight"] = dense
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text().replace("quantization_config", "_was"))
    save_file(tensors, target / "model.safetensors")


@pytest.fixture(scope="module", params=SITUATIONS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    root = tmp_path_factory.mktemp(request.param)
    SITUATIONS[request.param](root / "packed")
    write_dequantised(root / "packed", root / "dense")
    return request.param, root / "packed", root / "dense"


@pytest.mark.parametrize("family", list(Family))
def test_fp32_logits_equal_those_of_the_dequantised_weights(pair: tuple[str, Path, Path], family: Family) -> None:
    name, packed, dense = pair
    assert name in {layer.format for layer in Checkpoint.open(packed).formats.layers.values()}
    assert torch.equal(logits(packed, torch.float32, family), logits(dense, torch.float32, family))


def test_bf16_activations_see_the_same_bits_in_steps_of_any_length(pair: tuple[str, Path, Path]) -> None:
    model = load_model(pair[1]).model
    cache = new_cache(model)
    together = run_chunks(model, cache, TOKENS, [90], Family.STEP)
    apart = run_chunks(model, new_cache(model), TOKENS, [1] * 40 + [17, 33], Family.STEP)
    assert torch.equal(together, apart)


def test_quantising_changes_the_logits_a_little_and_not_a_lot(tmp_path: Path) -> None:
    bf16(tmp_path / "plain")
    intel_int4(tmp_path / "int4")
    qwen_fp8(tmp_path / "fp8")
    truth = logits(tmp_path / "plain", torch.float32, Family.PREFILL)

    def error(name: str) -> float:
        return float((logits(tmp_path / name, torch.float32, Family.PREFILL) - truth).norm() / truth.norm())

    assert 0 < error("fp8") < error("int4") < 0.7  # round to nearest on random weights, 4 layers deep


def test_an_int8_head_is_read(tmp_path: Path) -> None:
    from stoker.weights.formats.int8 import Int8Row

    bf16(tmp_path)
    head = next(file for file in tmp_path.glob("*.safetensors") if "lm_head.weight" in load_file(file))
    dense = load_file(head)["lm_head.weight"]
    packed = Int8Row.quantize(dense.float())
    rewrite(head, lambda tensors: tensors.update({f"lm_head.{k}": v for k, v in packed.tensors().items()}))
    (tmp_path / INDEX).unlink()
    config = (tmp_path / "config.json").read_text().rstrip().removesuffix("}").rstrip()
    extra = '{"quant_method": "auto-round", "bits": 16, "data_type": "float", "group_size": 128, "sym": true, '
    extra += '"extra_config": {"lm_head": {"bits": 8, "data_type": "int", "group_size": -1}}}'
    (tmp_path / "config.json").write_text(f'{config}, "quantization_config": {extra}}}')
    model = load_model(tmp_path, dtype=torch.float32).model
    hidden = torch.randn(3, dense.shape[1])
    assert torch.allclose(model.logits(hidden), hidden @ packed.dequantize().t(), atol=1e-5)


def test_experts_in_two_formats_are_refused_by_name(tmp_path: Path) -> None:
    intel_int4(tmp_path, group=32)
    name = "model.language_model.layers.1.mlp.experts.3.up_proj"
    file = next(f for f in tmp_path.glob("*.safetensors") if f"{name}.scales" in load_file(f))

    def to_group_64(tensors: dict[str, Tensor]) -> None:
        other = Int4.quantize(torch.randn(64, 128), group=64).tensors()
        tensors.update({f"{name}.{suffix}": tensor for suffix, tensor in other.items()})

    rewrite(file, to_group_64)
    with pytest.raises(CheckpointError, match=r"experts\.3\.up_proj"):
        load_model(tmp_path)


def test_a_quantised_embedding_is_refused(tmp_path: Path) -> None:
    from stoker.weights.formats.fp8 import Fp8Block

    qwen_fp8(tmp_path)
    name = "model.language_model.embed_tokens"
    file = next(f for f in tmp_path.glob("*.safetensors") if f"{name}.weight" in load_file(f))

    def quantise(tensors: dict[str, Tensor]) -> None:
        packed = Fp8Block.quantize(tensors[f"{name}.weight"].float()).tensors()
        tensors.update({f"{name}.{suffix}": tensor for suffix, tensor in packed.items()})

    rewrite(file, quantise)
    config = (tmp_path / "config.json").read_text().replace(f'"{name}",', "").replace(f'"{name}"', '"lm_head"')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(
        CheckpointError, match=r"embed_tokens.weight is stored as fp8-b128, which Stoker reads in 16 or 32 bit only"
    ):
        load_model(tmp_path)
