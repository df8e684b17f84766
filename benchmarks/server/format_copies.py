"""Copies of the embedded model in other formats, healthy and damaged, for `benchmarks/server/check_formats.py`.

The shipped weights lie on the grids of INT4, FP8 and INT8, so a copy in these formats would be exact. The reference is
the BF16 export with every weight moved by up to half a step of its grid: as weights lie that were never quantised.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stoker.checkpoint.build import BuildOptions, build
from stoker.demo import EMBEDDED
from stoker.weights.formats.nvfp4 import Nvfp4

GROUP = 128  # inputs per INT4 scale
SEED = 26
LAYER = 4  # the one whose scales are halved
HEAD = "lm_head.weight"
SHARED = ("shared_expert.gate_proj.weight", "shared_expert.up_proj.weight", "shared_expert.down_proj.weight")
PROJECTIONS = (
    *("in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight"),
    *("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"),
)
Tensors = dict[str, Tensor]
Say = Callable[[str], None]


def make(out: Path, say: Say = print) -> dict[str, Path]:
    """The reference first, then copies by name. Those that are there already are kept."""
    out.mkdir(parents=True, exist_ok=True)
    exported, reference = out / "export", out / "reference"
    _once(exported, say, lambda: _build(exported, BuildOptions(base=str(EMBEDDED), to="bf16")))
    _once(reference, say, lambda: _write(reference, exported, _moved(_load(exported))))
    made = {"reference": reference}
    for name, options in {
        "FP8": BuildOptions(base=str(reference), quantize="fp8"),
        "INT4": BuildOptions(base=str(reference), quantize="int4"),
        "INT4, FP8 shared experts": BuildOptions(base=str(reference), quantize="int4", shared_experts="fp8"),
    }.items():
        made[name] = out / _folder(name)
        _once(made[name], say, lambda options=options, name=name: _build(made[name], options))  # type: ignore[misc]
    weights = _load(reference)
    for name, change in DAMAGES.items():
        made[name] = out / _folder(name)
        _once(made[name], say, lambda change=change, name=name: _write(made[name], reference, change(weights)))  # type: ignore[misc]
    made["NVFP4"] = out / "nvfp4"
    _once(made["NVFP4"], say, lambda: _write(made["NVFP4"], reference, _nvfp4(weights), _NVFP4_CONFIG))
    halved = out / "halved"
    made["one layer's scales halved"] = halved
    _once(halved, say, lambda: _write(halved, made["INT4"], _halved(_load(made["INT4"]))))
    return made


def _moved(weights: Tensors) -> Tensors:
    """Every weight elsewhere within half a step of its grid, drawn evenly."""
    rng = torch.Generator().manual_seed(SEED)

    def noise(like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=rng) - 0.5

    moved = dict(weights)
    for name in sorted(weights):
        values = weights[name].float()
        if name == HEAD:
            step = values.abs().amax(-1, keepdim=True) / 127
        elif name.endswith(SHARED):
            step = values.abs() / 8  # E4M3 has three bits behind the leading one
        elif name.endswith(PROJECTIONS) or ".experts." in name:
            step = (values.unflatten(-1, (-1, GROUP)).abs().amax(-1, keepdim=True) / 8).expand(
                *values.shape[:-1], -1, GROUP
            )
            step = step.flatten(-2)
        else:
            continue
        moved[name] = (values + noise(values) * step).to(weights[name].dtype)
    return moved


def _two_bits(weights: Tensors) -> Tensors:
    """Routed experts of the trunk on four levels."""

    def rounded(values: Tensor) -> Tensor:
        groups = values.float().unflatten(-1, (-1, GROUP))
        step = groups.abs().amax(-1, keepdim=True) / 1.5
        return (((groups / step - 0.5).round().clamp(-2, 1) + 0.5) * step).flatten(-2).to(values.dtype)

    return {name: rounded(values) if _is_expert(name) else values for name, values in weights.items()}


def _head_per_tensor(bits: int) -> Callable[[Tensors], Tensors]:
    """The head with a single scale."""

    def change(weights: Tensors) -> Tensors:
        head, most = weights[HEAD].float(), 2 ** (bits - 1) - 1
        step = head.abs().max() / most
        return {**weights, HEAD: ((head / step).round() * step).to(weights[HEAD].dtype)}

    return change


def _halved(weights: Tensors) -> Tensors:
    part = f".layers.{LAYER}."
    return {
        name: values / 2 if part in name and name.endswith(".scales") and not name.startswith("mtp.") else values
        for name, values in weights.items()
    }


DAMAGES: dict[str, Callable[[Tensors], Tensors]] = {
    "2-bit experts": _two_bits,
    "head INT8 per tensor": _head_per_tensor(8),
    "head INT4 per tensor": _head_per_tensor(4),
}

_NVFP4_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*embed_tokens.*",
        "re:.*in_proj_a.*",
        "re:.*in_proj_b.*",
        "re:.*conv1d.*",
        "re:.*mlp[.]gate$",
        "re:.*shared_expert_gate.*",
        "re:mtp.*",
    ],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "symmetric": True,
            },
        }
    },
}


def _nvfp4(weights: Tensors) -> Tensors:
    """Experts, shared experts and projections of the trunk, as llm-compressor writes them."""
    found: Tensors = {}
    for name, values in weights.items():
        if name.startswith("mtp.") or not (name.endswith((*PROJECTIONS, *SHARED)) or _is_expert(name)):
            found[name] = values
            continue
        for module, matrix in _matrices(name, values):
            for suffix, tensor in Nvfp4.quantize(matrix, where=name).tensors().items():
                found[f"{module}.{suffix}"] = tensor
    return found


def _matrices(name: str, values: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Fused experts one by one, gate and up apart."""
    if values.dim() == 2:
        return [(name.removesuffix(".weight"), values)]
    stem, kind = name.rsplit(".", 1)
    if kind == "down_proj":
        return [(f"{stem}.{expert}.down_proj", matrix) for expert, matrix in enumerate(values)]
    return [
        (f"{stem}.{expert}.{part}", matrix)
        for expert, pair in enumerate(values)
        for part, matrix in zip(("gate_proj", "up_proj"), pair.chunk(2), strict=True)
    ]


def _is_expert(name: str) -> bool:
    return ".mlp.experts." in name and not name.startswith("mtp.")


def _folder(name: str) -> str:
    return name.lower().replace(",", "").replace(" ", "-")


def _once(path: Path, say: Say, work: Callable[[], None]) -> None:
    if (path / "config.json").exists():
        return
    say(f"making {path.name}")
    shutil.rmtree(path, ignore_errors=True)
    work()


def _build(out: Path, options: BuildOptions) -> None:
    build(options, out)


def _load(directory: Path) -> Tensors:
    found: Tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def _write(directory: Path, like: Path, weights: Tensors, quantization: Mapping[str, object] | None = None) -> None:
    """Weights with the tokenizer and config of another directory; the config last, since it marks a whole one."""
    directory.mkdir()
    for file in like.iterdir():
        if file.suffix in (".json", ".jinja") and file.name not in (
            "config.json",
            "stoker.json",
            "model.safetensors.index.json",
        ):
            shutil.copyfile(file, directory / file.name)
    save_file({name: values.contiguous() for name, values in weights.items()}, directory / "model.safetensors")
    config = json.loads((like / "config.json").read_text(encoding="utf-8"))
    if quantization is not None:
        config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
