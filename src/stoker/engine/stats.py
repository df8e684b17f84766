"""What an engine has done and what it holds, as plain numbers."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from stoker.engine.request import Finish, Stats
from stoker.engine.scheduler import Scheduler
from stoker.speculate.depth.controller import DepthController


@dataclass
class Totals:
    """Counted as the engine goes; requests are added when they end."""

    steps: int = 0  # verify steps
    step_s: float = 0.0  # that they took
    step_tokens: int = 0  # computed by them, drafts included
    prefill_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    forced: int = 0
    depths: dict[int, int] = field(default_factory=dict)  # steps of requests by number of drafts
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in Finish})

    def add(self, stats: Stats, finish: Finish) -> None:
        self.finished[finish.value] += 1
        for name in ("cached_tokens", "output_tokens", "drafted", "accepted", "forced"):
            setattr(self, name, getattr(self, name) + getattr(stats, name))
        for depth, steps in stats.depths.items():
            self.depths[depth] = self.depths.get(depth, 0) + steps


@dataclass(frozen=True)
class EngineStats:
    running: int
    waiting: int
    pages: int
    pages_used: int
    pages_cached: int  # of them, those that only snapshots hold: free as soon as somebody needs them
    slots: int
    slots_used: int
    snapshots: int
    cache_bytes: int  # KV pages, state slots and snapshots, used or not
    preemptions: int
    totals: Totals
    depth_controller: dict[str, Any] | None  # its choices and predictions, distinct experts

    @classmethod
    def of(
        cls,
        totals: Totals,
        scheduler: Scheduler,
        cache_bytes: int,
        controller: DepthController | None,
    ) -> "EngineStats":
        return cls(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages=scheduler.pages.size,
            pages_used=scheduler.pages.size - scheduler.pages.free,
            pages_cached=scheduler.pages.reclaimable,
            slots=scheduler.slots.size,
            slots_used=scheduler.slots.size - scheduler.slots.free,
            snapshots=len(scheduler.prefixes),
            cache_bytes=cache_bytes,
            preemptions=scheduler.preemptions,
            totals=deepcopy(totals),
            depth_controller=controller.stats() if controller else None,
        )
