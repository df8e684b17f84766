"""Every kernel that an engine launches, found without a GPU: its launches are made on tensors without memory.

Nothing here knows a kernel. The engine's own constructors and programs run, as `measure.py` does it to count bytes, and
Triton says at each launch what it would compile. Pointers count as multiples of 16, as those of allocations are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from stoker.backends.gpu.backend import GpuBackend
from stoker.backends.gpu.build import gpu_backend
from stoker.backends.gpu.kernels.launch import Card, assumed
from stoker.backends.gpu.prefill import MOST_PARTS
from stoker.backends.network.load import load_model
from stoker.engine.config import EngineConfig
from stoker.engine.request import Request
from stoker.engine.step import Chunk
from stoker.sampling.sampler import Row
from stoker.sampling.settings import Sampling
from stoker.speculate.choice import DraftChoice


class Needed(NamedTuple):
    """A kernel as Triton compiles it; `data` is Triton's description of arguments, constants and options."""

    module: str
    name: str
    key: str  # tells variants of a kernel apart
    data: str


@dataclass(frozen=True)
class NoDriver:
    """Stands in for the driver of a card: says which it is, launches nothing."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def list_kernels(
    directory: Path, sizes: EngineConfig, draft: DraftChoice, target: GPUTarget, card: Card,
    found: Callable[[Needed], object],
) -> None:  # fmt: skip
    """Calls `found` with each kernel of an engine on this checkpoint, of which only headers are read."""
    with launches_told(target, found), assumed(card), torch.inference_mode():
        model = load_model(directory, device="meta").model
        backend, _ = gpu_backend(model, sizes, draft, directory)  # its programs run as they are made
        run_prompts(backend)


def run_prompts(backend: GpuBackend) -> None:
    """Prompts of every number of rows that a kernel is compiled anew for, then as many at once as may be."""
    budget, longest = backend.engine.prefill_budget, backend.tables.shape[1] * 64
    counts = [1, *(count for count in (16 << place for place in range(16)) if count < budget), budget]
    for count in (count for count in counts if count < longest):
        _run(backend, [count])
        _run(backend, [count], more=1)
    for parts in range(2, min(MOST_PARTS, backend.engine.slots) + 1):
        _run(backend, [1] * parts)


def _run(backend: GpuBackend, counts: list[int], more: int = 0) -> None:
    """Chunks of so many tokens, with `more` tokens of their prompts to come."""
    chunks = []
    for slot, count in enumerate(counts):
        request = Request(slot, [0] * (count + more), Sampling(), 0, slot=slot)
        backend.reset(slot)
        first = None if more else Row(request.sampling, count, request.prompt, ())
        chunks.append(Chunk(request, [0] * count, first))
    backend.prefill(chunks)
    backend.observe([[0] * count for count in counts])


@contextmanager
def launches_told(target: GPUTarget, found: Callable[[Needed], object]) -> Iterator[None]:
    """No kernel is launched inside; each that would have to be compiled first is told once. For a process that launches
    none later either: its driver stays the stand-in."""
    seen: set[tuple[str, str, str]] = set()

    def hook(*, key: str, fn: Any, compile: dict[str, Any], **rest: Any) -> bool:
        name = fn.name.rpartition(".")[2]
        if (fn.module, name, key) not in seen:
            seen.add((fn.module, name, key))
            found(Needed(fn.module, name, key, compile["specialization_data"]))
        return True  # Triton leaves it at that

    before = triton.knobs.runtime.jit_cache_hook
    driver.set_active(NoDriver(target))
    triton.knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook = before


def compile_kernel(needed: Needed) -> Any:
    """Into Triton's cache, for the target of the active driver."""
    kernel = getattr(import_module(needed.module), needed.name)
    return kernel.preload(needed.data)
