"""From trained weights to Hugging Face style checkpoints in bf16 that transformers, vLLM and Stoker load.

    python -m training.export --weights DIR --out DIR [--drafter DIR] [--int4-group 128]

--weights is a run directory of train_trunk or train_mtp, --drafter one of train_dflash, which is written to OUT/dflash.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from training.config import SHAPES, Config, Shape
from training.dflash import Drafter
from training.model import Model
from training.quantize import snap
from training.state import fill, load_weights

SHARD_BYTES = 15 * 2**20
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
# published in fp32: rounding them moves every decay and every gated norm
FLOAT32 = ("A_log", "linear_attn.norm.weight")


def published(model: Model, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Tensors under the names of the text-only checkpoint: trunk experts fused, MTP experts one by one."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().cpu().float()
        values = values if name.endswith(FLOAT32) else values.to(dtype)
        if name.startswith("mtp."):
            tensors.update(_one_by_one(name, values))
        else:
            tensors[name if name == "lm_head.weight" else f"model.{name}"] = values
    return tensors


def _one_by_one(name: str, values: Tensor) -> dict[str, Tensor]:
    stem, kind = name.rsplit(".", 1)
    if kind not in ("gate_up_proj", "down_proj") or values.dim() != 3:
        return {name: values}
    if kind == "down_proj":
        return {f"{stem}.{e}.down_proj.weight": expert for e, expert in enumerate(values)}
    parts: dict[str, Tensor] = {}
    for e, expert in enumerate(values):
        gate, up = expert.chunk(2)
        parts |= {f"{stem}.{e}.gate_proj.weight": gate, f"{stem}.{e}.up_proj.weight": up}
    return parts


def write_checkpoint(
    directory: Path, config: Config, tensors: dict[str, Tensor], tokenizer: Path | None = None
) -> None:
    """config.json, shards of at most 15 MiB with their index, and the tokenizer's files."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, values in tensors.items():
        if size + values.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = values.contiguous()
        size += values.nbytes
    index: dict[str, str] = {}
    for place, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{place:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(values.nbytes for values in tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        (directory / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES if tokenizer else ():
        assert tokenizer is not None
        shutil.copyfile(tokenizer / name, directory / name)


def export_model(
    model: Model, shape: Shape, directory: Path, tokenizer: Path | None = None, dtype: torch.dtype = torch.bfloat16
) -> None:
    config = {**shape.trunk, "dtype": str(dtype).removeprefix("torch.")}
    write_checkpoint(directory, config, published(model, dtype), tokenizer)


def export_drafter(drafter: Drafter, shape: Shape, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    tensors = {name: p.detach().cpu().to(dtype) for name, p in drafter.named_parameters()}
    write_checkpoint(directory, {**shape.drafter, "dtype": str(dtype).removeprefix("torch.")}, tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True, help="run directory with the trunk and MTP head")
    parser.add_argument("--drafter", type=Path, help="run directory with the drafter")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo")
    parser.add_argument("--tokenizer", type=Path, default=Path("build/training/tokenizer"))
    parser.add_argument(
        "--int4-group", type=int, help="put weights on the INT4 grid of this group, so that it loses none"
    )
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    model = Model(shape.model)
    fill(model, load_weights(options.weights))
    if options.int4_group:
        snap(model, options.int4_group)
    export_model(model, shape, options.out, options.tokenizer)
    if options.drafter:
        drafter = Drafter(shape.dflash)
        fill(drafter, load_weights(options.drafter))
        if options.int4_group:
            snap(drafter, options.int4_group)
        export_drafter(drafter, shape, options.out / "dflash")
    files = sorted(options.out.rglob("*.safetensors"))
    print(f"{options.out}: {len(files)} files of weights, {sum(f.stat().st_size for f in files):,} bytes")


if __name__ == "__main__":
    main()
