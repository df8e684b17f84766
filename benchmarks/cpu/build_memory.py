"""Resident memory of `stoker build` on a synthetic checkpoint of about 4 GB, whose largest tensor is over 1 GB.

    python benchmarks/cpu/build_memory.py [--directory DIR] [--layers 4] [--memory 1GiB] [--json FILE]

Each build runs in a process of its own, which reports VmHWM: the most memory it ever had resident, the Python
runtime and torch included. The values are random; names, shapes and dtypes are those of a Qwen3.5 MoE release.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.support.random_checkpoint import small_config

from stoker.checkpoint.build import BuildOptions, build
from stoker.checkpoint.build.options import parse_bytes, show_bytes
from stoker.weights.model_config import ModelConfig
from stoker.weights.names import model_parameters, single_experts

LIMIT = 1_500_000_000  # bytes resident, whatever the checkpoint's size
BUILDS = {  # in this order: the third exports what the first made
    "quantise to hybrid": {"base": "bf16", "quantize": "hybrid"},
    "copy, INT8 head": {"base": "bf16", "lm_head": "int8"},
    "export to bf16": {"base": "0", "to": "bf16"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where the checkpoints go; a temporary directory by default")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # options, --out, --memory: what a process does
    arguments = parser.parse_args()
    if arguments.one:
        options, out, memory = arguments.one
        print(json.dumps(_one(BuildOptions(**json.loads(options)), Path(out), int(memory))))
        return
    with tempfile.TemporaryDirectory(prefix="stoker-build-", dir=arguments.directory) as folder:
        result = _measure(Path(folder), arguments.layers, parse_bytes(arguments.memory, "--memory"))
    text = json.dumps(result, indent=2)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)


def _measure(folder: Path, layers: int, memory: int) -> dict[str, Any]:
    size, largest = _write_base(folder / "bf16", layers)
    print(f"limit {show_bytes(LIMIT)}; checkpoint {show_bytes(size)}, largest tensor {show_bytes(largest)}", flush=True)
    rows = []
    for number, (name, options) in enumerate(BUILDS.items()):
        recipe = options | {"base": str(folder / options["base"])}
        command = [sys.executable, __file__, "--one", json.dumps(recipe), str(folder / str(number)), str(memory)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        row = {"recipe": name, **json.loads(done.stdout)}
        verdict = "within" if row["resident_bytes"] <= LIMIT else "OVER"
        print(
            f"{name}: {show_bytes(row['resident_bytes'])} resident, {row['seconds']:.0f} s, {verdict} the limit",
            flush=True,
        )
        rows.append(row)
        if number == 1:
            shutil.rmtree(folder / "1")
    return {
        "checkpoint_bytes": size,
        "largest_tensor_bytes": largest,
        "memory_option_bytes": memory,
        "limit_bytes": LIMIT,
        "rows": rows,
    }


def _one(options: BuildOptions, out: Path, memory: int) -> dict[str, Any]:
    before = _resident("VmRSS")
    started = time.perf_counter()
    report = build(options, out, memory=memory)
    return {
        "runtime_bytes": before,  # Python, torch and Stoker, before anything is opened
        "resident_bytes": _resident("VmHWM"),
        "seconds": time.perf_counter() - started,
        "result_bytes": sum(file["bytes"] for file in report.files.values()),
    }


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system has no /proc/self/status to read the resident memory from")


def _write_base(directory: Path, layers: int) -> tuple[int, int]:
    """A BF16 release: fused experts in the trunk, single ones in the MTP head, a file per parameter."""
    config = small_config(
        hidden_size=2048, num_hidden_layers=layers, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, head_dim=256, num_attention_heads=16, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, vocab_size=248320,
    )  # fmt: skip
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    noise = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    total = largest = 0
    for number, (name, shape) in enumerate(model_parameters(ModelConfig.from_dict(config)).items()):
        mtp, experts = name.startswith("mtp."), ".mlp.experts." in name
        shapes = single_experts(name, shape) if mtp and experts else {name: shape}
        tensors = {}
        for tensor, size in shapes.items():
            count = torch.Size(size).numel()
            values = noise.repeat(-(-count // len(noise)))[:count].reshape(size).clone()
            stored = tensor if mtp or tensor == "lm_head.weight" else f"model.{tensor}"
            tensors[stored] = values.float() if tensor.endswith(("A_log", "linear_attn.norm.weight")) else values
            total, largest = total + values.nbytes, max(largest, values.nbytes)
        save_file(tensors, directory / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
    return total, largest


if __name__ == "__main__":
    main()
