"""From a model on the GPU to what an engine runs on: its weights packed in place, and the drafter asked for."""

from pathlib import Path

from stoker.backends.cpu.decoder import Decoder
from stoker.backends.cpu.load import load_drafter
from stoker.backends.family import PAGE_SIZE
from stoker.backends.gpu.dflash import pack_dflash
from stoker.backends.gpu.runner import GpuBackend
from stoker.backends.gpu.weights import StepWeights, pack_decoder
from stoker.engine.config import EngineConfig
from stoker.errors import ConfigError, RequestError
from stoker.speculate.choice import DRAFTER_FOLDER, LIMITS, DraftChoice
from stoker.speculate.combine import FirstOf
from stoker.speculate.drafter import Drafter
from stoker.speculate.lookup import LookupDrafter
from stoker.speculate.low_bits import lower_all
from stoker.weights.model_config import ModelConfig


def gpu_backend(
    model: Decoder, engine: EngineConfig, draft: DraftChoice, directory: Path, weights: StepWeights | None = None
) -> tuple[GpuBackend, Drafter | None]:
    """The model's layers are handed over: afterwards it has only its embedding. Not so if `weights` are packed already,
    for several engines on one model."""
    config = model.config
    _check(config, engine, draft)
    choice = draft.resolved(model, directory)
    for kind in choice.kinds:
        choice.expect(kind, model, directory)
    positions = min(config.max_positions, engine.pages * PAGE_SIZE)
    if weights is None:
        if choice.weights and "mtp" in choice.kinds and model.mtp is not None:
            lower_all(model.mtp, choice.weights)
        weights = pack_decoder(model, positions, release=True)
    backend = GpuBackend(config, engine, weights)
    drafters = [_drafter(kind, backend, choice, model, directory, positions) for kind in choice.kinds]
    if len(drafters) == 2:
        return backend, FirstOf(drafters[0], drafters[1])
    return backend, drafters[0] if drafters else None


def _drafter(
    kind: str, backend: GpuBackend, choice: DraftChoice, model: Decoder, directory: Path, positions: int
) -> Drafter:
    depth = min(choice.depth, LIMITS[kind])
    if kind == "lookup":
        return LookupDrafter(depth)
    if kind == "mtp":
        return backend.draft_with_mtp(depth)
    weight = model.embed_tokens.weight
    network = load_drafter(directory / DRAFTER_FOLDER, model.config, weight.dtype, weight.device)
    if choice.weights:
        lower_all(network, choice.weights)
    return backend.draft_with_dflash(network.config, pack_dflash(network, positions), depth)


def _check(config: ModelConfig, engine: EngineConfig, draft: DraftChoice) -> None:
    if config.moe is None or not all(config.sparse_layers):
        raise ConfigError(
            "the GPU step computes mixtures of experts; this model has dense layers. Run it with --device cpu."
        )
    if engine.kv_dtype == "fp32":
        raise RequestError("keys and values are to be stored as fp32; the GPU stores them as bf16 or fp8.")
    for name in ("vocab", "head"):
        if getattr(draft, name) is not None:
            raise RequestError(
                f"--draft asks for {name}={getattr(draft, name)}: on the GPU drafts are made from the whole head. "
                "Leave it out."
            )
