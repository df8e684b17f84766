"""From a checkpoint directory to a model in memory: 16- and 32-bit safetensors, read straight into place."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from stoker.errors import CheckpointError
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.dflash import DFlash, DFlashConfig
from stoker.weights.checkpoint import Checkpoint
from stoker.weights.names import MTP_PREFIX, Piece, map_drafter, map_parameters
from stoker.weights.read import read_tensor

CONFIG_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all


@dataclass(frozen=True)
class Loaded:
    model: Decoder
    config: ModelConfig
    notes: list[str]  # what was not used, and why


def load_model(
    directory: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Loaded:
    """The trunk and, where the checkpoint has one, its MTP head. `dtype` defaults to what config.json says."""
    config = ModelConfig.load(directory)
    checkpoint = Checkpoint.open(directory)
    notes = list(checkpoint.notes)
    mtp = bool(config.mtp_layers and checkpoint.names(MTP_PREFIX))
    if config.mtp_layers and not mtp:
        notes.append("config.json announces an MTP head, but there are no mtp.* tensors: no MTP drafting.")
    with _skeleton(dtype or config_dtype(config)):
        model = Decoder(config, mtp=mtp)
    pieces, unused = map_parameters(_shapes(model), checkpoint, config.tie_word_embeddings)
    _fill(model, pieces, checkpoint, device, progress)
    return Loaded(model, config, notes + unused)


def load_drafter(directory: Path, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu") -> DFlash:
    config = DFlashConfig.load(directory)
    checkpoint = Checkpoint.open(directory)
    with _skeleton(dtype):
        drafter = DFlash(config)
    _fill(drafter, map_drafter(_shapes(drafter), checkpoint), checkpoint, device, None)
    return drafter


def config_dtype(config: ModelConfig) -> torch.dtype:
    if config.dtype not in CONFIG_DTYPES:
        raise CheckpointError(
            f"config.json asks for dtype {config.dtype!r}, expected one of {', '.join(CONFIG_DTYPES)}."
        )
    return CONFIG_DTYPES[config.dtype]


@contextmanager
def _skeleton(dtype: torch.dtype) -> Iterator[None]:
    """Modules made inside have parameters of this dtype and no memory."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def _fill(
    module: nn.Module,
    pieces: dict[str, list[Piece]],
    checkpoint: Checkpoint,
    device: torch.device | str,
    progress: Progress | None,
) -> None:
    infos = {name: [checkpoint.tensors[piece.tensor] for piece in parts] for name, parts in pieces.items()}
    total, done = sum(info.nbytes for parts in infos.values() for info in parts), 0
    filled: dict[int, nn.Parameter] = {}  # a tied head is one parameter under two names
    for name, meta in list(module.named_parameters(remove_duplicate=False)):
        if id(meta) not in filled:
            tensor = torch.empty(meta.shape, dtype=meta.dtype, device=device)
            for piece, info in zip(pieces[name], infos[name], strict=True):
                tensor[piece.index].copy_(read_tensor(info))
                done += info.nbytes
                if progress:
                    progress(done, total)
            filled[id(meta)] = nn.Parameter(tensor, requires_grad=False)
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, filled[id(meta)])
