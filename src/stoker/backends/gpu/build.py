"""From a model on the GPU to what an engine runs on: its weights packed in place, and the drafter asked for."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from stoker.backends.family import PAGE_SIZE
from stoker.backends.gpu.backend import GpuBackend
from stoker.backends.gpu.dflash import pack_dflash
from stoker.backends.gpu.drafting import GpuDFlash, GpuMtp
from stoker.backends.gpu.weights import StepWeights, pack_decoder
from stoker.backends.network.count import step_bytes
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.load import load_drafter
from stoker.backends.network.low_bits import lower_all
from stoker.backends.progress import COMPILING, DRAFTER, PACKING, Report, silent
from stoker.backends.reference import REFERENCES_ONLY
from stoker.engine.config import EngineConfig
from stoker.errors import ConfigError, RequestError
from stoker.speculate.choice import DRAFTER_FOLDER, LIMITS, DraftChoice
from stoker.speculate.dflash import DFlashDrafter
from stoker.speculate.drafter import Drafter, combine
from stoker.speculate.lookup import LookupDrafter
from stoker.speculate.mtp import MtpDrafter
from stoker.weights.model_config import ModelConfig


class Kernels(Protocol):
    """Kernels that are being compiled."""

    def wait(self, progress: Callable[[int, int], object]) -> None:
        """Until they are; `progress` is told how many of them are done, and how many there are."""


def gpu_backend(
    model: Decoder,
    engine: EngineConfig,
    draft: DraftChoice,
    directory: Path,
    weights: StepWeights | None = None,
    report: Report = silent,
    kernels: Kernels | None = None,
) -> tuple[GpuBackend, Drafter | None]:
    """The model's layers are handed over: afterwards it has only its embedding. Not so if `weights` are packed already,
    for several engines on one model. `kernels` are being compiled, and waited for before they are launched."""
    config = model.config
    _check(config, engine, draft)
    if REFERENCES_ONLY:
        from stoker.backends.gpu import reference

        reference.install()
    choice = draft.resolved(model.mtp is not None, directory)
    positions = min(config.max_positions, engine.pages * PAGE_SIZE)
    read = step_bytes(model)
    if weights is None:
        if choice.weights and "mtp" in choice.kinds and model.mtp is not None:
            lower_all(model.mtp, choice.weights)
        weights = pack_decoder(model, positions, release=True, progress=partial(report, PACKING))
    network: GpuMtp | GpuDFlash | None = None
    drafters: list[Drafter] = []
    for kind in choice.kinds:
        depth = min(choice.depth, LIMITS[kind])
        if kind == "lookup":
            drafters.append(LookupDrafter(depth))
        elif kind == "mtp":
            network = GpuMtp(config, weights, engine.pages, engine.slots, depth)
            drafters.append(MtpDrafter(network, depth))
        else:
            report(DRAFTER)
            network = _dflash(model, engine, choice, directory, weights, depth, positions)
            drafters.append(DFlashDrafter(network, depth))
    if kernels is not None:
        kernels.wait(partial(report, COMPILING))
    return GpuBackend(config, engine, weights, read, network, report), combine(drafters)


def _dflash(
    model: Decoder,
    engine: EngineConfig,
    choice: DraftChoice,
    directory: Path,
    trunk: StepWeights,
    depth: int,
    positions: int,
) -> GpuDFlash:
    weight = model.embed_tokens.weight
    network = load_drafter(directory / DRAFTER_FOLDER, model.config, weight.dtype, weight.device)
    if choice.weights:
        lower_all(network, choice.weights)
    weights = pack_dflash(network, positions)
    return GpuDFlash(network.config, weights, trunk, engine.pages, engine.slots, depth)


def _check(config: ModelConfig, engine: EngineConfig, draft: DraftChoice) -> None:
    if config.moe is None or not all(config.sparse_layers):
        raise ConfigError(
            "the GPU step computes mixtures of experts; this model has dense layers. Run it with --device cpu."
        )
    if engine.kv_dtype == "fp32":
        raise RequestError("keys and values are to be stored as fp32; the GPU stores them as bf16 or fp8.")
    if REFERENCES_ONLY and engine.kv_dtype == "fp8":
        raise RequestError(
            "STOKER_OPS=reference replaces the GPU's kernels by references, which store keys and values as bf16, not "
            "fp8. Leave STOKER_OPS out, or store them as bf16."
        )
    if REFERENCES_ONLY and config.delta is None:
        raise ConfigError(
            "STOKER_OPS=reference replaces the GPU's kernels by references, which need DeltaNet layers; of this "
            f"model's {len(config.layer_types)} layers none is one. Leave STOKER_OPS out, or run it with --device cpu."
        )
    for name in ("vocab", "head"):
        if getattr(draft, name) is not None:
            raise RequestError(
                f"--draft asks for {name}={getattr(draft, name)}: on the GPU drafts are made from the whole head. "
                "Leave it out."
            )
