"""Caches are counted as they are allocated, by both backends and to the byte; a plan keeps to its budget."""

import pytest
import torch

from stoker.backends.memory import tensor_bytes
from stoker.backends.network.cache import Cache, KVPages, Snapshots
from stoker.backends.network.load import config_dtype
from stoker.demo import EMBEDDED
from stoker.plan.catalog import find_model
from stoker.sizes.memory import Caches, Item, caches_of, plan_memory, size
from stoker.sizes.network import Drafter, Network
from stoker.sizes.step import Draft
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import ModelConfig
from tests.conftest import FAMILIES
from tests.support.random_checkpoint import small_config, small_drafter_config

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
PLENTY = 1 << 40


def the_122b() -> ModelConfig:
    config = find_model("122b").config
    assert config is not None
    return config


def config_of(name: str) -> ModelConfig:
    if name in FAMILIES:
        return ModelConfig.from_dict(small_config(name))
    return the_122b() if name == "122B" else ModelConfig.load(EMBEDDED)


CONFIGS = ("embedded", "122B", *FAMILIES)
CASES = pytest.mark.parametrize(
    ("name", "depth", "kv"),
    [(name, depth, kv) for name in CONFIGS for depth in (0, 2, 12, 15) for kv in ("bf16", "fp8")],
)


def drafts(depth: int) -> Draft:
    return Draft("lookup", depth) if depth else Draft()


@CASES
def test_caches_of_the_cpu_are_those_allocated(name: str, depth: int, kv: str) -> None:
    config = config_of(name)
    dtype = config_dtype(config)
    found = caches_of(Network.of(config), "stoker", kv, drafts(depth), cpu=True, activation=dtype.itemsize)

    def bytes_of(pages: int, slots: int) -> int:
        cache = Cache.allocate(config, pages=pages, slots=slots, window=1 + depth, dtype=dtype, device="meta",
                               kv_dtype=DTYPES[kv])  # fmt: skip
        return tensor_bytes(cache.layers)

    assert found.page == bytes_of(1, 0)
    assert found.slot == bytes_of(0, 1)
    cache = Cache.allocate(config, pages=0, slots=1, dtype=dtype, device="meta")
    assert found.snapshot == tensor_bytes(Snapshots.allocate(cache, 1))


@CASES
def test_caches_of_the_gpu_are_those_allocated(name: str, depth: int, kv: str) -> None:
    pytest.importorskip("triton")
    from stoker.backends.gpu.slots import GpuSnapshots
    from stoker.backends.gpu.state import GpuCache

    config = config_of(name)
    found = caches_of(Network.of(config), "stoker", kv, drafts(depth))

    def allocate(pages: int, slots: int) -> GpuCache:
        return GpuCache.allocate(config, pages=pages, slots=slots, window=1 + depth, device="meta", kv_dtype=DTYPES[kv])

    assert found.page == tensor_bytes([layer for layer in allocate(1, 1).layers if isinstance(layer, KVPages)])
    deltas = allocate(1, 1).deltas
    assert found.slot == (tensor_bytes(deltas) if deltas else 0)
    kernel = config.delta.conv_kernel if config.delta else 1
    assert found.snapshot == tensor_bytes(GpuSnapshots.allocate(deltas, kernel, 1))


def test_a_position_of_the_122bs_ring_is_under_2_mib() -> None:
    """One state whatever the depth, and what steps feed in."""
    network = Network.of(the_122b())
    slots = [caches_of(network, "stoker", "bf16", drafts(depth)).slot for depth in (2, 6)]
    assert network.recurrent_bytes == 144 << 20
    assert 0 < (slots[1] - slots[0]) / 8 <= 2 << 20


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_keys_and_values_of_drafters_are_those_allocated(kind: str) -> None:
    """In 16 bit whatever the trunk's are stored in, and of all tokens, those behind a sliding window too."""
    config = ModelConfig.from_dict(small_config())
    own = DFlashConfig.from_dict(small_drafter_config(small_config()))
    layers, heads, dim = (
        (1, config.num_kv_heads, config.head_dim) if kind == "mtp"
        else (len(own.layer_types), own.num_kv_heads, own.head_dim)
    )  # fmt: skip
    network = Network.of(config, drafter=Drafter.of(own))
    for kv in ("bf16", "fp8"):
        plain = caches_of(network, "stoker", kv, Draft("lookup", 4), cpu=True)
        found = caches_of(network, "stoker", kv, Draft(kind, 4), cpu=True)
        page = tensor_bytes(KVPages.allocate(1, heads, dim, torch.bfloat16, "meta"))
        assert found.page - plain.page == layers * page
    assert found.draft_slot == (config.hidden_size * 2 if kind == "mtp" else 0)


def test_engines_differ_in_what_a_sequence_keeps() -> None:
    """vLLM a state per draft and one, with a convolution that reaches back over the drafts; llama.cpp one."""
    model = find_model("122b")
    one = (144 << 20) + 36 * 12_288 * 3 * 2

    def state(engine: str, depth: int) -> int:
        return caches_of(model, engine, "bf16", drafts(depth)).slot

    assert state("vLLM", 2) == 3 * ((144 << 20) + 36 * 12_288 * (3 + 2) * 2)
    assert state("vLLM", 0) == state("llama.cpp", 2) == one


SMALL = Caches(page_tokens=64, token=64, slot=1 << 20, snapshot=1 << 19, how={"KV cache": "", "slot": ""})


def test_a_budget_buys_what_is_asked_for_and_then_fewer_pages() -> None:
    loaded, beside = [Item("weights", 1 << 20)], [Item("buffers", 1 << 10)]
    exact = (1 << 20) + (1 << 10) + 2 * SMALL.slot + 3 * SMALL.snapshot + 32 * SMALL.page

    def plan(budget: int | None) -> tuple[int, int, bool]:
        found = plan_memory(SMALL, loaded, beside, context=1000, users=2, prefix_cache=(3 << 19) + 9, budget=budget)
        if budget is not None and found.fits:
            assert found.total <= budget
        return found.pages, found.snapshots, found.fits

    assert plan(exact) == plan(PLENTY) == plan(None) == (32, 3, True)
    assert plan(exact - 1) == (31, 3, True)
    assert plan(exact - 16 * SMALL.page) == (16, 3, True)
    assert plan(exact - 16 * SMALL.page - 1) == (15, 3, False)
    found = plan_memory(SMALL, loaded, beside, context=1000, users=2, prefix_cache=3 << 19, budget=exact)
    assert found.total == exact
    assert [item.name for item in found.items] == ["weights", "KV cache", "recurrent state", "prefix cache", "buffers"]


def test_a_prefix_cache_nobody_sized_takes_a_share_of_what_is_left() -> None:
    many = plan_memory(SMALL, [], context=64, users=2, prefix_cache=None, budget=PLENTY)
    assert many.snapshots == 32
    few = plan_memory(SMALL, [], context=64, users=2, prefix_cache=None, budget=20 << 20)
    assert few.snapshots * SMALL.snapshot == 4 << 20


def test_sizes_are_written_with_their_unit() -> None:
    assert [size(n) for n in (1, 1536, 3 << 20, 5 << 30)] == ["1 bytes", "1.5 KiB", "3.0 MiB", "5.0 GiB"]
