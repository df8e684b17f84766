"""From a checkpoint, or a model that is loaded, to the backend for its device, and the drafter asked for."""

from collections.abc import Callable, Sequence
from pathlib import Path

from stoker.backends.network.decoder import Decoder
from stoker.backends.network.load import load_model
from stoker.engine.backend import Backend
from stoker.engine.config import EngineConfig
from stoker.speculate.choice import DraftChoice
from stoker.speculate.drafter import Drafter
from stoker.weights.reader import Progress


def build_backend(
    model: Decoder,
    engine: EngineConfig,
    draft: DraftChoice,
    directory: Path,
    report: Callable[[str], None] = lambda phase: None,
) -> tuple[Backend, Drafter | None]:
    """`report` is told of each phase. Dense models have no kernels on the GPU and run the CPU's operations there."""
    if model.embed_tokens.weight.is_cuda and model.config.moe is not None:
        from stoker.backends.gpu.build import gpu_backend

        report("kernels")
        return gpu_backend(model, engine, draft, directory)
    from stoker.backends.cpu.build import cpu_backend

    return cpu_backend(model, engine, draft, directory, report)


def load_backend(
    directory: Path,
    device: str,
    engine: EngineConfig,
    draft: DraftChoice,
    report: Callable[[str], None],
    progress: Progress,
) -> tuple[Backend, Drafter | None, Sequence[str]]:
    """With notes on what was not used of the checkpoint. `progress` is that of `load_model`."""
    loaded = load_model(directory, device=device, progress=progress)
    return *build_backend(loaded.model, engine, draft, directory, report), loaded.notes
