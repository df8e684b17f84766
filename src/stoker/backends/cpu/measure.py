"""Bytes of one page, slot and snapshot on the CPU, and of what a drafting network adds.

Sizes are read off the cache's own tensors, made on the meta device, so a plan cannot drift from what is allocated.
"""

from dataclasses import dataclass

import torch

from stoker.backends.cpu.cache import Cache, KVPages, Snapshots
from stoker.backends.memory import tensor_bytes
from stoker.engine.config import EngineConfig
from stoker.engine.memory import UnitBytes
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import ModelConfig


@dataclass(frozen=True)
class DrafterBytes:
    """What a drafter keeps: KV in pages of the same numbers as the model's, and something per slot."""

    page: int = 0
    slot: int = 0

    @classmethod
    def mtp(cls, config: ModelConfig, dtype: torch.dtype) -> "DrafterBytes":
        """One attention layer, and the head's last output."""
        kv = KVPages.allocate(1, config.num_kv_heads, config.head_dim, dtype, "meta")
        return cls(tensor_bytes(kv), config.hidden_size * dtype.itemsize)

    @classmethod
    def dflash(cls, config: DFlashConfig, dtype: torch.dtype) -> "DrafterBytes":
        kv = KVPages.allocate(1, config.num_kv_heads, config.head_dim, dtype, "meta")
        return cls(len(config.layer_types) * tensor_bytes(kv))


def unit_bytes(
    config: ModelConfig,
    max_depth: int,
    dtype: torch.dtype,
    drafter: DrafterBytes | None = None,
    kv_dtype: str | None = None,
) -> UnitBytes:
    drafter = drafter or DrafterBytes()

    def cache(pages: int, slots: int) -> Cache:
        sizes = EngineConfig(max(1, pages), max(1, slots), max_depth, kv_dtype=kv_dtype)
        return Cache.of_engine(config, sizes, dtype, torch.device("meta"), pages=pages, slots=slots)

    return UnitBytes(
        page=tensor_bytes(cache(1, 0)) + drafter.page,
        slot=tensor_bytes(cache(0, 1)) + drafter.slot,
        checkpoint=tensor_bytes(Snapshots.allocate(cache(0, 1), 1)),
    )
