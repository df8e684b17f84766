"""From a checkpoint, or a model that is loaded, to the backend for its device, and the drafter asked for."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from stoker.backends.network.load import load_model
from stoker.backends.progress import PACKING, READING, Report, silent
from stoker.engine.backend import Backend
from stoker.engine.config import EngineConfig
from stoker.speculate.choice import DraftChoice
from stoker.speculate.drafter import Drafter
from stoker.weights.model_config import ModelConfig
from stoker.weights.reader import Progress


def load_backend(
    directory: Path,
    device: str,
    engine: EngineConfig,
    draft: DraftChoice,
    report: Report = silent,
) -> tuple[Backend, Drafter | None, Sequence[str]]:
    """With notes on what was not used of the checkpoint. `report` is told of each phase. Dense models have no kernels
    on the GPU and run the CPU's operations there."""
    if torch.device(device).type != "cuda" or ModelConfig.load(directory).moe is None:
        from stoker.backends.cpu.build import cpu_backend

        loaded = load_model(directory, device=device, progress=reading(report))
        return *cpu_backend(loaded.model, engine, draft, directory, report), loaded.notes
    from stoker.backends.gpu.build import gpu_backend
    from stoker.backends.gpu.compile_ahead import compile_ahead

    with ExitStack() as stack:
        kernels = stack.enter_context(compile_ahead(directory, torch.device(device), engine, draft))
        loaded = load_model(directory, device=device, progress=reading(report))
        found = gpu_backend(loaded.model, engine, draft, directory, report=report, kernels=kernels)
    return *found, loaded.notes


def reading(report: Report) -> Progress:
    """The progress of `load_model`, which reads all weights and then packs them where a CPU computes with them."""
    phase = READING

    def progress(done: int, total: int) -> None:
        nonlocal phase
        report(phase, done, total)
        if done == total:
            phase = PACKING

    return progress
