"""Bytes counted without memory are those of an engine that has it."""

import gc
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("triton")

import stoker.backends.network.load
import stoker.backends.network.low_bits
from stoker.backends.gpu.backend import GpuBackend
from stoker.backends.gpu.build import gpu_backend
from stoker.backends.gpu.graphs import Download, Upload
from stoker.backends.gpu.measure import count, measure, tensors_of
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.load import load_model
from stoker.demo import EMBEDDED
from stoker.engine.config import EngineConfig
from stoker.engine.engine import Engine
from stoker.sizes.memory import caches_of
from stoker.sizes.network import Drafter, Network
from stoker.sizes.step import Draft
from stoker.speculate.choice import DRAFTER_FOLDER, DraftChoice
from stoker.weights.dflash_config import DFlashConfig


def on_the_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def alive() -> tuple[list[Tensor], list[Upload | Download]]:
    """Tensors in host memory that anyone holds, whoever it is, and the ways to and from the device."""
    gc.collect()
    objects: list[Any] = gc.get_objects()
    tensors = [each for each in objects if issubclass(type(each), Tensor) and on_the_cpu(each)]
    return tensors, [each for each in objects if issubclass(type(each), Upload | Download)]


def storages(tensors: list[Tensor]) -> dict[int, int]:
    """Bytes of each."""
    parts = [tensor.untyped_storage() for tensor in tensors]
    return {part._cdata: part.nbytes() for part in parts}


def built(sizes: EngineConfig, choice: DraftChoice) -> tuple[Engine, GpuBackend, Decoder]:
    model = load_model(EMBEDDED).model
    backend, drafter = gpu_backend(model, sizes, choice, EMBEDDED)
    return Engine(sizes, backend, drafter), backend, model


@pytest.mark.parametrize(
    ("draft", "kv_dtype"), [("none", "fp8"), ("mtp:3,weights=int8", None), ("lookup+dflash:4", None)]
)
def test_counted_bytes_are_those_allocated(monkeypatch: pytest.MonkeyPatch, draft: str, kv_dtype: str | None) -> None:
    """On the CPU in the GPU's place, where every tensor of the process can be found without knowing who has it."""
    for module in (stoker.backends.network.load, stoker.backends.network.low_bits):
        monkeypatch.setattr(module, "prepare", lambda module, progress=None: None)  # the CPU's own order of weights
    choice = DraftChoice.parse(draft)
    sizes = EngineConfig(pages=20, slots=3, max_depth=choice.depth, snapshots=2, kv_dtype=kv_dtype)
    built(sizes, choice)  # tables that operations keep for whoever comes next
    before, _ = alive()
    engine, backend, model = built(sizes, choice)
    found = count(backend)
    tensors, ways = alive()
    new = storages(tensors)
    packed = storages(list(tensors_of(backend.weights, set())))
    handed_over = tensors_of([vars(part) for part in model.modules()], set())  # norms are left in it
    unpacked = [tensor for tensor in handed_over if tensor.untyped_storage()._cdata not in packed]
    for known in (before, [way._host for way in ways], unpacked):
        for key in storages(known):
            new.pop(key, None)
    assert found.counted == sum(new.values())
    assert measure(EMBEDDED, sizes, choice) == found
    kind = next((kind for kind in ("mtp", "dflash") if kind in choice.kinds), "lookup")
    own = Drafter.of(DFlashConfig.load(EMBEDDED / DRAFTER_FOLDER))
    network = Network.of(model.config, drafter=own)
    caches = caches_of(network, "stoker", kv_dtype or "bf16", Draft(kind, choice.depth))
    planned = caches.own(sizes.pages, sizes.slots, sizes.snapshots)
    assert planned == engine.stats().cache_bytes, "what the server's self-test compares"
    assert found.slots == sizes.slots * caches.slot
    assert found.snapshots == sizes.snapshots * caches.snapshot
    assert found.pages + found.drafter_pages == sizes.pages * caches.page
    assert (found.drafter > 0) == (found.drafter_pages > 0) == (draft != "none")
