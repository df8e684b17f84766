"""Weights to train on from, out of a checkpoint that Stoker serves: quantised tensors become fp32 again.

So training can go on from the model in the repository, without the run directories it came from.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from stoker.backends.network.decoder import Decoder
from stoker.backends.network.dflash import DFlash
from stoker.backends.network.linear import as_tensor
from stoker.backends.network.load import load_drafter, load_model
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import ModelConfig

CONFIG = "config.json"


def is_checkpoint(directory: Path) -> bool:
    return (directory / CONFIG).is_file()


def checkpoint_weights(directory: Path) -> dict[str, Tensor]:
    """fp32 parameters under the names of training.model.Model, or of training.dflash.Drafter where it is a drafter."""
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    if "dflash_config" in config:
        trunk = ModelConfig.load(directory.parent)  # a drafter lies in the directory of its trunk
        with torch.device("meta"):
            names = [name for name, _ in DFlash(DFlashConfig.load(directory)).named_parameters()]
        return _read(load_drafter(directory, trunk, dtype=torch.float32), names)
    loaded = load_model(directory, dtype=torch.float32)
    with torch.device("meta"):
        names = [name for name, _ in Decoder(loaded.config, mtp=loaded.model.mtp is not None).named_parameters()]
    return _read(loaded.model, names)


def _read(served: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    found = {}
    for name in names:
        owner, _, attribute = name.rpartition(".")
        found[name] = as_tensor(getattr(served.get_submodule(owner), attribute)).detach().float()
    return found
