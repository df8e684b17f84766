"""From a checkpoint directory to a model in memory, each weight in the format it is stored in."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from stoker.backends.network.decoder import Decoder
from stoker.backends.network.dflash import DFlash
from stoker.backends.network.linear import Weight
from stoker.backends.network.norm import RMSNorm
from stoker.backends.network.staging import Staging
from stoker.backends.reference import REFERENCES_ONLY
from stoker.weights.checkpoint import Checkpoint
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.formats import format_class
from stoker.weights.formats.base import WeightFormat
from stoker.weights.formats.int4_ct import Int4Ct
from stoker.weights.formats.joined import Joined
from stoker.weights.formats.layout import PLAIN_FORMATS
from stoker.weights.formats.rules import LayerFormat
from stoker.weights.headers import TensorInfo
from stoker.weights.model_config import ModelConfig
from stoker.weights.problems import Problem, refuse_errors
from stoker.weights.reader import DTYPES, THREADS, Progress, read_tensors
from stoker.weights.resolve import Filling, Resolution, resolve_drafter, resolve_model

MOST_THREADS = 8  # that read for a GPU, on machines with twice as many processors


@dataclass(frozen=True)
class Loaded:
    model: Decoder
    config: ModelConfig
    notes: list[str]  # what was not used, and why
    largest: int  # bytes of the largest tensor that was read


def load_model(
    directory: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Loaded:
    """The trunk and, where the checkpoint has one, its MTP head, ready to compute.

    `dtype` is that of plain weights and of activations; it defaults to what config.json says. `progress` is told of
    reading and then, on the CPU, of packing. On the device "meta" only headers are read, for whoever counts bytes.
    """
    config = ModelConfig.load(directory)
    checkpoint = Checkpoint.open(directory)
    resolution = resolve_model(config, checkpoint)
    notes = [note.message for note in (*checkpoint.unlisted, *_checked(resolution))]
    with _skeleton(dtype or config_dtype(config)):
        model = Decoder(config, mtp=resolution.has_mtp)
    largest = _fill(model, resolution, device, progress)
    prepare(model, progress)
    return Loaded(model, config, notes, largest)


def load_drafter(
    directory: Path,
    trunk: ModelConfig,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> DFlash:
    config = DFlashConfig.load(directory)
    config.check_fits(trunk)
    resolution = resolve_drafter(config, Checkpoint.open(directory))
    _checked(resolution)
    with _skeleton(dtype):
        drafter = DFlash(config)
    _fill(drafter, resolution, device, progress)
    prepare(drafter, progress)
    return drafter


def prepare(module: nn.Module, progress: Progress | None = None) -> None:
    """Lays out the weights for the backend that will compute with them; again, after weights were replaced.

    The CPU backend takes bf16 activations; fp32 networks are computed by the references.
    """
    norm = next(part.weight for part in module.modules() if isinstance(part, RMSNorm))
    if norm.device.type == "cpu" and norm.dtype == torch.bfloat16 and not REFERENCES_ONLY:
        from stoker.backends.network.packing.pack import pack_model

        pack_model(module, progress)


def config_dtype(config: ModelConfig) -> torch.dtype:
    assert config.dtype_bytes  # else it is refused
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


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


def _checked(resolution: Resolution) -> list[Problem]:
    """Raises the first error that `stoker inspect` would list, else gives what is left out and why."""
    checkpoint, problems = resolution.checkpoint, resolution.problems()
    refuse_errors([*checkpoint.format_problems, *problems], checkpoint.directory)
    return problems


def _fill(module: nn.Module, resolution: Resolution, device: torch.device | str, progress: Progress | None) -> int:
    """Allocates every weight, reads all tensors into their places, then hangs the weights into the module. Returns the
    bytes of the largest tensor."""
    checkpoint, parameters = resolution.checkpoint, dict(module.named_parameters())
    fillings = {name: resolution.fillings[name] for name in parameters}
    places: dict[str, Tensor] = {}  # tensor of the checkpoint -> where it goes
    plain = {
        name: _place_plain(filling, parameters[name], places, device)
        for name, filling in fillings.items()
        if filling.formats <= set(PLAIN_FORMATS.values())
    }
    packed = {
        name: [_place_packed(layers, filling.stacked, places, checkpoint, device) for layers in filling.layers]
        for name, filling in fillings.items()
        if name not in plain
    }
    infos = [checkpoint.tensors[name] for name in places]
    largest = max((info.nbytes for info in infos), default=0)
    _read(infos, places, torch.device(device), progress)
    places.clear()  # what is laid out anew below must be the last to hold its tensors
    weights: dict[str, Weight] = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in plain.items()}
    for name in list(packed):
        parts = [
            _for_kernels(
                format_class(layers[0].format).from_tensors(tensors, str(checkpoint.directory / layers[0].name))
            )
            for layers, tensors in zip(fillings[name].layers, packed.pop(name), strict=True)
        ]
        weights[name] = parts[0] if len(parts) == 1 else Joined(tuple(parts))
    _hang(module, weights)
    return largest


def _read(
    infos: Sequence[TensorInfo], places: Mapping[str, Tensor], device: torch.device, progress: Progress | None
) -> None:
    """Reads tensors into their places, which are on this device."""
    if device.type == "meta":
        return
    if device.type == "cuda":
        staging, threads = Staging(device), max(THREADS, min(MOST_THREADS, (os.cpu_count() or 1) // 2))
        for info, values in read_tensors(infos, into=staging.take, threads=threads, progress=progress):
            staging.send(values, places[info.name])
        staging.finish()
        return
    for info, values in read_tensors(
        infos, into=lambda info: _in_place(places[info.name], info.dtype), progress=progress
    ):
        if values.data_ptr() != places[info.name].data_ptr():
            places[info.name].copy_(values)


def _for_kernels(weight: WeightFormat) -> WeightFormat:
    """compressed-tensors' INT4 in the order that all kernels read, where its scales allow; else as it is."""
    return weight.in_gptq_order() or weight if isinstance(weight, Int4Ct) else weight


def _place_plain(
    filling: Filling, parameter: nn.Parameter, places: dict[str, Tensor], device: torch.device | str
) -> Tensor:
    """One tensor of the parameter's shape; single experts fill their rows of it."""
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    if not filling.stacked:
        ((layer,),) = filling.layers
        places[layer.tensors["weight"]] = whole
        return whole
    row = 0
    for band in filling.layers:
        rows = band[0].shape[0]
        for expert, layer in enumerate(band):
            places[layer.tensors["weight"]] = whole[expert, row : row + rows]
        row += rows
    return whole


def _place_packed(
    band: tuple[LayerFormat, ...],
    stacked: bool,
    places: dict[str, Tensor],
    checkpoint: Checkpoint,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """The tensors of a quantised weight as on disk, with an expert dimension in front where experts are single."""
    tensors = {}
    for suffix in band[0].tensors:
        first = checkpoint.tensors[band[0].tensors[suffix]]
        shape = (len(band), *first.shape) if stacked else first.shape
        tensors[suffix] = torch.empty(shape, dtype=DTYPES[first.dtype], device=device)
        for expert, layer in enumerate(band):
            places[layer.tensors[suffix]] = tensors[suffix][expert] if stacked else tensors[suffix]
    return tensors


def _in_place(place: Tensor, dtype: str) -> Tensor | None:
    """`place` itself where the reader can write into it: in host memory, contiguous, of the file's own dtype."""
    fits = place.device.type == "cpu" and place.dtype == DTYPES[dtype] and place.is_contiguous()
    return place if fits else None


def _hang(module: nn.Module, weights: dict[str, Weight]) -> None:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for alias, meta in list(module.named_parameters(remove_duplicate=False)):
        path, _, attribute = alias.rpartition(".")
        owner = module.get_submodule(path)
        delattr(owner, attribute)
        setattr(owner, attribute, weights[names[id(meta)]])  # a tied head is one parameter under two names
