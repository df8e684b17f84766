"""A plan in bytes is what an engine and its drafter then allocate, to the byte."""

from pathlib import Path

import pytest

from stoker.backends.cpu.drafting import CpuDFlash, CpuMtp
from stoker.backends.memory import tensor_bytes
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.load import load_drafter, load_model
from stoker.engine.config import EngineConfig
from stoker.sampling.settings import Sampling
from stoker.sizes.memory import caches_of, plan_memory
from stoker.sizes.network import Drafter, Network
from stoker.sizes.step import Draft
from tests.conftest import FAMILIES
from tests.engine.drive import drain, engine_on
from tests.support.random_checkpoint import small_config, small_drafter_config, write_random_drafter

DEPTH = 5


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        (family, kind)
        for family in FAMILIES
        for kind in ("none", "mtp", "dflash")
        if (family, kind) != ("qwen3_moe", "mtp")
    ],
)
def test_what_is_planned_is_what_is_allocated(
    checkpoints: dict[str, Path], tmp_path: Path, family: str, kind: str
) -> None:
    model = load_model(checkpoints[family]).model
    own, guess = None, "lookup" if kind == "none" else kind
    if kind == "dflash":
        write_random_drafter(tmp_path, small_drafter_config(small_config(family)))
        network = load_drafter(tmp_path, model.config)
        own = Drafter.of(network.config)
    caches = caches_of(Network.of(model.config, drafter=own), "stoker", "bf16", Draft(guess, DEPTH), cpu=True)
    budget = 3 << 20
    plan = plan_memory(caches, [], context=500, users=3, pages=1 << 20, prefix_cache=1 << 19, budget=budget)
    config = EngineConfig(plan.pages, 3, DEPTH, snapshots=plan.snapshots)
    drafter: CpuMtp | CpuDFlash | None = None
    if kind == "mtp":
        drafter = CpuMtp(model, config.pages, config.slots)
    elif kind == "dflash":
        drafter = CpuDFlash(model, network, config.pages)
    engine = engine_on(model, config, drafter)
    held = engine.stats().cache_bytes
    assert held == caches.own(config.pages, config.slots, config.snapshots)
    if isinstance(drafter, CpuMtp):
        held += tensor_bytes(drafter.pages) + drafter.last.nbytes
    elif drafter:
        held += tensor_bytes(drafter.pages)
    assert held == plan.total
    assert budget - caches.page < held <= budget
    assert config.snapshots * caches.snapshot <= 1 << 19
    engine.submit([1] * 480, Sampling(max_tokens=20), DEPTH if drafter else 0)
    assert len(drain(engine)[0]) == 20


def test_fp8_keys_and_values_are_planned_with_their_scales(model: Decoder) -> None:
    network = Network.of(model.config)
    narrow, wide = (caches_of(network, "stoker", kv, Draft("lookup", DEPTH), cpu=True) for kv in ("fp8", "bf16"))
    assert wide.page / 2 < narrow.page < wide.page * 0.6
    assert (narrow.slot, narrow.snapshot) == (wide.slot, wide.snapshot)
    config = EngineConfig(pages=8, slots=2, max_depth=DEPTH, kv_dtype="fp8")
    assert engine_on(model, config).stats().cache_bytes == narrow.own(8, 2, 0)
