"""Bytes of an engine on the GPU, counted before there is one: its own constructors, on tensors without memory.

Nothing here knows a size, so a plan cannot drift from what is allocated. Only what CUDA takes beside tensors is
assumed, and says so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from stoker.backends.gpu.backend import GpuBackend
from stoker.backends.gpu.build import gpu_backend
from stoker.backends.gpu.drafting import GpuDFlash
from stoker.backends.gpu.graphs import Download, Upload
from stoker.backends.network.cache import KVPages
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.load import load_model
from stoker.engine.config import EngineConfig
from stoker.speculate.choice import DraftChoice

CONTEXT = 512 << 20  # CUDA's own, and compiled kernels
GRAPH = 4 << 20  # a recorded graph of some hundred launches
MOMENTARY = 4  # tensors of the size of the logits that sampling and confidences make for a moment


@dataclass(frozen=True)
class GpuBytes:
    """Of an engine of these sizes. All but the last are counted."""

    sizes: EngineConfig
    weights: int  # packed; those of a drafting network too
    pages: int  # keys and values
    drafter_pages: int
    slots: int  # recurrent states, and the tokens of a step to replay
    snapshots: int
    steps: int  # of the largest bucket: buffers, logits, attention's unfinished sums; and the numbers of every bucket
    copies: int  # of dense weights, for prompts
    prompts: int  # buffers of a chunk
    drafter: int  # buffers of a drafting network and its last outputs
    graphs: int  # assumed: CUDA's context, kernels, graphs, and what sampling needs for a moment

    @property
    def counted(self) -> int:
        caches = self.pages + self.drafter_pages + self.slots + self.snapshots
        return self.weights + caches + self.copies + self.steps + self.prompts + self.drafter


def measure(directory: Path, sizes: EngineConfig, draft: DraftChoice, model: Decoder | None = None) -> GpuBytes:
    """Of an engine on a checkpoint, of which only headers are read, if they are not in `model` already (on the device
    meta; its layers are handed over). Raises what building it would raise."""
    model = model or load_model(directory, device="meta").model
    return count(gpu_backend(model, sizes, draft, directory)[0])


def count(backend: GpuBackend) -> GpuBytes:
    """Of a backend as it is."""
    network, cache = backend.network, backend.cache.tensors
    seen: set[int] = set()

    def taken(*holders: object) -> int:
        """Bytes of tensors that nothing counted before has."""
        total = 0
        for tensor in tensors_of(holders, set()):
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
        return total

    return GpuBytes(  # in this order: what two have is counted where it comes first
        sizes=backend.engine,
        weights=taken(backend.weights, network.network.weights if isinstance(network, GpuDFlash) else ()),
        pages=taken([layer for layer in cache.layers if isinstance(layer, KVPages)]),
        drafter_pages=taken(network.network.pages if network else ()),
        slots=taken(cache.deltas),
        snapshots=taken(backend.snapshots),
        drafter=taken(network),
        copies=taken(backend.prompts.copies),
        prompts=taken(backend.prompts),
        steps=taken(backend.cache, backend.programs),
        graphs=CONTEXT + backend.graphs * GRAPH + MOMENTARY * max(each.logits.nbytes for each in backend.programs),
    )


def tensors_of(holder: Any, known: set[int]) -> Iterator[Tensor]:
    """All that can be reached from here. What an upload or download has on the host is left out."""
    if id(holder) in known or isinstance(holder, nn.Module | type):
        return
    known.add(id(holder))
    if isinstance(holder, Tensor):
        yield holder
        return
    parts: tuple[Any, ...] = ()
    match holder:
        case Upload():
            parts = (holder.target,)
        case Download():
            parts = (holder.source,)
        case tuple() | list():
            parts = tuple(holder)
        case dict():
            parts = tuple(holder.values())
        case _ if hasattr(holder, "__self__"):  # launches, as the method that makes them
            parts = (holder.__self__,)
        case _ if hasattr(holder, "__dict__"):
            parts = tuple(vars(holder).values())
    for part in parts:
        yield from tensors_of(part, known)
