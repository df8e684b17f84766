"""An MTP head that is there and worthless is told from a sound one, in every format, from a few samples."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stoker.checkpoint.inspect.report import inspect
from stoker.checkpoint.inspect.sample import _spots, sample
from stoker.weights.formats import format_class
from stoker.weights.formats.fp8 import Fp8Block, Fp8Tensor
from stoker.weights.formats.int4 import Int4
from stoker.weights.formats.int8 import Int8Row
from stoker.weights.formats.nvfp4 import Nvfp4, Nvfp4ModelOpt
from stoker.weights.formats.plain import Plain
from stoker.weights.formats.rules import formats_in
from stoker.weights.headers import Reads, read_header
from tests.support import situations
from tests.support.situations import Tensors, rewrite

WEIGHT = torch.randn(272, 384, generator=torch.Generator().manual_seed(1)) / 20


def fp8_tensor(weight: Tensor) -> Fp8Tensor:
    scale = weight.abs().amax() / 448
    return Fp8Tensor((weight / scale).to(torch.float8_e4m3fn), scale)


STORED: dict[str, Callable[[Tensor], Any]] = {
    "bf16": lambda w: Plain(w.bfloat16()),
    "fp16": lambda w: Plain(w.half()),
    "fp32": Plain,
    "fp8 blocks": Fp8Block.quantize,
    "fp8 tensor": fp8_tensor,
    "int8 rows": Int8Row.quantize,
    "nvfp4": Nvfp4.quantize,
    "nvfp4 modelopt": Nvfp4ModelOpt.quantize,
}


def write(weight: Any, path: Path) -> Tensor:
    """One layer `a` in a file -> its values by the reference."""
    save_file({f"a.{suffix}": tensor.contiguous() for suffix, tensor in weight.tensors().items()}, path)
    values: Tensor = weight.dequantize()
    return values


@pytest.mark.parametrize("spot_bytes", [1 << 20, 100])
@pytest.mark.parametrize(
    ("name", "experts"),
    [(name, experts) for name in STORED for experts in ((), (3,)) if (name, experts) != ("fp8 tensor", (3,))],
)
def test_samples_are_the_values_of_the_reference(
    name: str, experts: tuple[int, ...], spot_bytes: int, tmp_path: Path
) -> None:
    weight = STORED[name](WEIGHT * torch.arange(1.0, 4.0)[:, None, None] if experts else WEIGHT)
    values = write(weight, tmp_path / "a.safetensors").flatten().numpy()
    tensors = read_header(tmp_path / "a.safetensors")
    layer = formats_in({name: (info.dtype, info.shape) for name, info in tensors.items()}).layers["a"]
    packed = tensors.get("a.weight_packed", tensors.get("a.weight"))
    assert packed is not None
    per_element = 2 if layer.format.startswith("nvfp4") else 1
    spots = _spots(packed, spot_bytes)
    assert len(spots) == (4 if spot_bytes == 100 else 1)
    reads = Reads()
    for spot, sampled in zip(spots, sample(layer, tensors, reads, spot_bytes), strict=True):
        expected = values[spot.start * per_element : spot.stop * per_element]
        np.testing.assert_allclose(sampled, expected, rtol=1e-6)
    assert format_class(layer.format) is type(weight)
    assert reads.count <= sum(info.nbytes for info in tensors.values())


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("experts", [(), (2,)])
def test_int4_samples_are_the_values_of_the_reference(group: int, experts: tuple[int, ...], tmp_path: Path) -> None:
    values = write(Int4.quantize(WEIGHT.expand(*experts, *WEIGHT.shape), group=group), tmp_path / "a.safetensors")
    tensors = read_header(tmp_path / "a.safetensors")
    layer = formats_in({name: (info.dtype, info.shape) for name, info in tensors.items()}).layers["a"]
    by_input = values.transpose(-1, -2).reshape(-1, WEIGHT.shape[0])  # [experts * in, out]
    first, *_, last = sample(layer, tensors, Reads(), spot_bytes=40)  # ten words: 80 values
    np.testing.assert_allclose(first, by_input[:8, :10].flatten().numpy(), rtol=1e-6)
    np.testing.assert_allclose(last, by_input[-8:, -10:].flatten().numpy(), rtol=1e-6)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with situations.one_thread():
        yield


@pytest.fixture(scope="module")
def intel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("intel")
    situations.intel_int4(directory)
    return directory


def copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target / "copy"))


def spoil(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name].clone())

    return edit


def with_value(value: float, at: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[at] = value
        return tensor

    return change


def half_zeros(tensor: Tensor) -> Tensor:
    tensor[len(tensor) // 2 :] = 0
    return tensor


EXPERT = "mtp.layers.0.mlp.experts.6.down_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        (EXPERT, torch.zeros_like, f"1 of 41 MTP tensors are constant where sampled, first {EXPERT} (0)"),
        (EXPERT, lambda t: t * 300, f"1 of 41 MTP tensors are of implausible size, first {EXPERT} (rms "),
        (EXPERT, lambda t: t / 300, "are of implausible size"),
        (EXPERT, with_value(float("nan"), 3), f"1 of 41 MTP tensors hold NaN or Inf, first {EXPERT}"),
        ("mtp.fc.weight", half_zeros, "constant where sampled, first mtp.fc.weight (0)"),
        ("mtp.fc.weight", lambda t: t * 300, "of implausible size, first mtp.fc.weight"),
        ("mtp.norm.weight", with_value(float("-inf"), 127), "hold NaN or Inf, first mtp.norm.weight"),
        ("mtp.norm.weight", torch.ones_like, "constant where sampled, first mtp.norm.weight (1)"),
        ("mtp.norm.weight", lambda t: t * 1e5, "implausibly large norms"),
        ("mtp.layers.0.mlp.gate.weight", lambda t: t.view(torch.int16).add(4000).view(torch.bfloat16), "implausible"),
    ],
)
def test_a_spoiled_tensor_is_found(
    name: str, change: Callable[[Tensor], Tensor], sentence: str, intel: Path, tmp_path: Path
) -> None:
    directory = copy(intel, tmp_path)
    rewrite(directory / situations.EXTRA, spoil(name, change))
    report = inspect(directory)
    (error,) = report.errors
    assert sentence in error.message
    assert (error.file, error.tensor) == (situations.EXTRA, name)
    assert (report.mtp.complete, report.mtp.sane) == (True, False)


def test_broken_scales_of_an_fp8_head_are_found(tmp_path: Path) -> None:
    situations.qwen_fp8(tmp_path)
    name = "mtp.layers.0.self_attn.q_proj.weight_scale_inv"
    for change, sentence in ((torch.ones_like, "implausible size"), (lambda t: t * torch.nan, "NaN or Inf")):
        for file in tmp_path.glob("*.safetensors"):
            rewrite(file, lambda t, c=change: spoil(name, c)(t) if name in t else None)  # type: ignore[misc]
        (error,) = inspect(tmp_path).errors
        assert sentence in error.message


def test_an_int4_head_is_judged_like_any_other(intel: Path, tmp_path: Path) -> None:
    directory = copy(intel, tmp_path)

    def quantize(tensors: Tensors) -> None:
        for name in [n for n in tensors if ".experts." in n or ("self_attn" in n and "_proj" in n)]:
            stored = Int4.quantize(tensors.pop(name).float(), group=32).tensors()
            tensors.update({name.replace("weight", suffix): tensor for suffix, tensor in stored.items()})

    rewrite(directory / situations.EXTRA, quantize)
    (directory / "model.safetensors.index.json").unlink()
    report = inspect(directory)
    assert (report.mtp.complete, report.mtp.sane, report.mtp.found) == (True, True, 41)
    broken = "mtp.layers.0.mlp.experts.2.up_proj.scales"
    rewrite(directory / situations.EXTRA, spoil(broken, lambda t: t * torch.inf))
    assert any("hold NaN or Inf" in error.message for error in inspect(directory).errors)


def test_a_head_cut_short_is_neither_complete_nor_read_past_its_end(intel: Path, tmp_path: Path) -> None:
    directory = copy(intel, tmp_path)
    path = directory / situations.EXTRA
    path.write_bytes(path.read_bytes()[:-5000])
    report = inspect(directory)
    assert (report.mtp.present, report.mtp.complete, report.mtp.sane) == (True, False, True)
    assert [error.message.split(":")[0] for error in report.errors] == [f"{situations.EXTRA} is cut short"]


def test_a_fresh_norm_is_sane_because_its_offset_is_zero(intel: Path, tmp_path: Path) -> None:
    directory = copy(intel, tmp_path)
    for name in ("mtp.norm.weight", "mtp.layers.0.self_attn.q_norm.weight"):
        rewrite(directory / situations.EXTRA, spoil(name, torch.zeros_like))
    report = inspect(directory)
    assert not report.errors
    assert report.mtp.sane


def test_one_small_trunk_layer_does_not_condemn_the_head(intel: Path, tmp_path: Path) -> None:
    """The trunk has one attention layer alone; that it is 40 times smaller says nothing about the head."""
    directory = copy(intel, tmp_path)
    kind = "self_attn.o_proj.scales"

    def shrink(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith(kind):
                tensors[name] = tensors[name] / 40

    for file in directory.glob("model-*.safetensors"):
        rewrite(file, shrink)
    report = inspect(directory)
    assert not report.errors
    assert report.mtp.sane
