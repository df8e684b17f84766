"""From a loaded model to the backend for the device it lies on, and the drafter asked for."""

from collections.abc import Callable
from pathlib import Path

from stoker.backends.cpu.decoder import Decoder
from stoker.engine.backend import Backend
from stoker.engine.config import EngineConfig
from stoker.speculate.choice import DraftChoice
from stoker.speculate.drafter import Drafter


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
