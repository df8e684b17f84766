"""Planning an engine from bytes: how many pages, slots and checkpoints a budget buys, before anything is allocated.

What one of each takes, a backend counts (`measure.py` of `backends/cpu` and `backends/gpu`).
"""

from dataclasses import dataclass
from typing import Any

from stoker.backends.family import PAGE_SIZE
from stoker.engine.config import EngineConfig
from stoker.errors import RequestError


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one of each."""

    page: int  # 64 tokens of KV, the drafter's too
    slot: int  # recurrent state of one request, the tokens of a step to replay, and what the drafter keeps
    checkpoint: int

    def total(self, config: EngineConfig) -> int:
        return config.pages * self.page + config.slots * self.slot + config.checkpoints * self.checkpoint


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


def size(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024.0:
            break
        value, unit = value / 1024.0, larger
    return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
