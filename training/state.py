"""What a run keeps on disk, in files of at most 15 MiB.

    weights-NN.safetensors   bf16 parameters: small enough to travel, enough to export or to start anew from
    exact-NN.safetensors     fp32 parameters and both Adam moments: lets a run go on as if never interrupted
    progress.json            step, seed, tokens seen

Without the exact files a run starts from the bf16 weights with fresh moments and a short warm-up. An MTP head that is
frozen is one that was never trained, and is left out.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.checkpoint import checkpoint_weights, is_checkpoint

FILE_BYTES = 15 * 2**20
WEIGHTS, EXACT, PROGRESS = "weights", "exact", "progress.json"


def save_run(
    directory: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None, progress: dict[str, Any]
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    parameters = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad or not _is_mtp(name)}
    _save(directory, WEIGHTS, {name: values.to(torch.bfloat16) for name, values in parameters.items()})
    if optimizer is not None:
        exact = {f"parameter/{name}": values for name, values in parameters.items()}
        for name, parameter in module.named_parameters():
            state = optimizer.state.get(parameter, {})
            exact |= {f"{key}/{name}": state[key] for key in ("exp_avg", "exp_avg_sq", "step") if key in state}
        _save(directory, EXACT, exact)
    (directory / PROGRESS).write_text(json.dumps(progress, indent=1) + "\n", encoding="utf-8")


def load_run(directory: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], bool]:
    """Progress, and whether the run goes on exactly; if not, the caller warms up again."""
    progress = json.loads((directory / PROGRESS).read_text(encoding="utf-8"))
    exact = _load(directory, EXACT)
    parameters = dict(module.named_parameters())
    fill(module, load_weights(directory))
    with torch.no_grad():
        for name, parameter in parameters.items():
            if f"exp_avg/{name}" in exact:
                step = exact[f"step/{name}"]  # the fused optimizer keeps its step count beside the parameters
                optimizer.state[parameter] = {
                    "step": step.to(parameter.device) if parameter.is_cuda else step,
                    "exp_avg": exact[f"exp_avg/{name}"].to(parameter.device),
                    "exp_avg_sq": exact[f"exp_avg_sq/{name}"].to(parameter.device),
                }
    return progress, bool(exact)


def fill(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Puts weights into place; only an MTP head may be missing, and then stays as it is."""
    missing, unexpected = module.load_state_dict(tensors, strict=False)
    wrong = [*unexpected, *(name for name in missing if not _is_mtp(name))]
    if wrong:
        raise ValueError(
            f"these weights are of another shape of model: {wrong[0]} and {len(wrong) - 1} more do not fit."
        )


def _is_mtp(name: str) -> bool:
    return name.startswith("mtp.")


def fill_mtp(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Puts the MTP head of other weights into place and leaves the trunk as it is."""
    head = {name: values for name, values in tensors.items() if _is_mtp(name)}
    if not head:
        raise ValueError("these weights hold no MTP head to go on from; leave --start out to begin with a new one.")
    wrong = module.load_state_dict(head, strict=False).unexpected_keys
    if wrong:
        raise ValueError(f"this MTP head is of another shape of model: {wrong[0]} does not fit.")


def load_weights(directory: Path) -> dict[str, Tensor]:
    """fp32 copies of a run's parameters: the exact ones if they are there, else the bf16 ones. A checkpoint that Stoker
    serves will do as well, in whatever format it is stored."""
    if is_checkpoint(directory):
        return checkpoint_weights(directory)
    exact = _load(directory, EXACT)
    found = {name.split("/", 1)[1]: v for name, v in exact.items() if name.startswith("parameter/")}
    found = found or {name: values.float() for name, values in _load(directory, WEIGHTS).items()}
    if not found:
        raise FileNotFoundError(
            f"{directory} holds no {WEIGHTS}-*.safetensors; give the directory of a training run or of a checkpoint."
        )
    return found


def _save(directory: Path, stem: str, tensors: dict[str, Tensor]) -> None:
    for old in directory.glob(f"{stem}-*.safetensors"):
        old.unlink()
    part: dict[str, Tensor] = {}
    count = size = 0
    for name, values in tensors.items():
        if part and size + values.nbytes > FILE_BYTES:
            save_file(part, directory / f"{stem}-{count:02d}.safetensors")
            part, size, count = {}, 0, count + 1
        part[name] = values.cpu().contiguous()
        size += values.nbytes
    save_file(part, directory / f"{stem}-{count:02d}.safetensors")


def _load(directory: Path, stem: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob(f"{stem}-*.safetensors")):
        tensors.update(load_file(path))
    return tensors
