"""Planning an engine from bytes: how many pages, slots and checkpoints a budget buys, before anything is allocated.

Sizes are read off the cache's own tensors, made on the meta device, so a plan cannot drift from what is allocated.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from stoker.backends.cpu.cache import Cache, KVPages, Snapshots
from stoker.backends.family import PAGE_SIZE
from stoker.engine.config import EngineConfig
from stoker.errors import RequestError
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import ModelConfig

_KV = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}


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


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one of each."""

    page: int  # 64 tokens of KV, the drafter's too
    slot: int  # recurrent state of one request, the tokens of a step to replay, and what the drafter keeps
    checkpoint: int

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        max_depth: int,
        dtype: torch.dtype,
        drafter: DrafterBytes | None = None,
        kv_dtype: str | None = None,
    ) -> "UnitBytes":
        drafter = drafter or DrafterBytes()

        def cache(pages: int, slots: int) -> Cache:
            sizes = EngineConfig(max(1, pages), max(1, slots), max_depth, kv_dtype=kv_dtype)
            return new_cache(config, sizes, dtype, torch.device("meta"), pages=pages, slots=slots)

        return cls(
            page=tensor_bytes(cache(1, 0)) + drafter.page,
            slot=tensor_bytes(cache(0, 1)) + drafter.slot,
            checkpoint=tensor_bytes(Snapshots.allocate(cache(0, 1), 1)),
        )

    def total(self, config: EngineConfig) -> int:
        return config.pages * self.page + config.slots * self.slot + config.checkpoints * self.checkpoint


def new_cache(
    config: ModelConfig,
    engine: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    pages: int | None = None,
    slots: int | None = None,
) -> Cache:
    """An engine's cache; `pages` and `slots` other than its own are for measuring."""
    kept = _KV[engine.kv_dtype] if engine.kv_dtype else dtype
    return Cache.allocate(
        config,
        pages=engine.pages if pages is None else pages,
        slots=engine.slots if slots is None else slots,
        window=engine.window,
        dtype=dtype,
        device=device,
        **({} if kept == dtype else {"kv_dtype": kept}),
    )


def plan(
    unit: UnitBytes, budget: int, *, context: int, slots: int = 8, checkpoint_bytes: int = 0, **options: Any
) -> EngineConfig:
    """The engine that fits `budget` bytes: the slots asked for, checkpoints within `checkpoint_bytes`, the rest pages.

    `context` tokens of one request must fit. `options` are those of EngineConfig that take no memory here; max_depth
    must be the one `unit` was made for.
    """
    for name, value in (("context", context), ("slots", slots)):
        if value < 1:
            raise RequestError(f"{name} is {value}, expected at least 1.")
    # without recurrent layers a checkpoint only pins pages; then the bytes limit how many pages they could pin at least
    checkpoints = checkpoint_bytes // (unit.checkpoint or unit.page)
    fixed = slots * unit.slot + checkpoints * unit.checkpoint
    need = -(-context // PAGE_SIZE)
    pages = (budget - fixed) // unit.page
    if pages < need:
        total = fixed + need * unit.page
        raise RequestError(
            f"{size(budget)} of cache are {total - budget:,} bytes too few: "
            f"{slots} slots take {size(slots * unit.slot)}, {checkpoints} checkpoints "
            f"{size(checkpoints * unit.checkpoint)}, and a context of {context:,} tokens needs {need:,} pages of "
            f"{size(unit.page)}: {size(total)} in all. "
            "Allow more, or ask for fewer slots, fewer checkpoint bytes or a shorter context."
        )
    return EngineConfig(pages=pages, slots=slots, checkpoints=checkpoints, **options)


def tensor_bytes(holder: Any) -> int:
    """Bytes of all tensors in a dataclass, or in a tuple or list of them. Memory that several lie in counts once."""
    parts = [tensor.untyped_storage() for tensor in _tensors(holder)]
    return sum({part._cdata: part.nbytes() for part in parts}.values())


def _tensors(holder: Any) -> Iterator[Tensor]:
    parts: Iterable[Any] = holder if isinstance(holder, tuple | list) else ()
    if isinstance(holder, Tensor):
        yield holder
    elif is_dataclass(holder):
        parts = [getattr(holder, field.name) for field in fields(holder)]
    for part in parts:
        yield from _tensors(part)


def discard(tensors: Iterable[Tensor], rows: Sequence[int]) -> int:
    """Gives the memory of these rows back to the system; they read as zeros from then on. Returns how many bytes.

    Only whole pages of host memory can be given back, and only Linux is asked to.
    """
    if sys.platform != "linux":
        return 0
    page, given = mmap.PAGESIZE, 0
    libc = ctypes.CDLL(None)
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            continue
        row = tensor.stride(0) * tensor.itemsize
        for first, count in _ranges(rows):
            start = tensor.data_ptr() + first * row
            aligned = -(-start // page) * page
            length = (start + count * row - aligned) // page * page
            if length > 0 and not libc.madvise(ctypes.c_void_p(aligned), ctypes.c_size_t(length), mmap.MADV_DONTNEED):
                given += length
    return given


def _ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as runs: first and count."""
    start = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield numbers[start], place - start
            start = place


def size(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024.0:
            break
        value, unit = value / 1024.0, larger
    return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
