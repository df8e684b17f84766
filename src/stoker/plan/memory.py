"""What a plan puts into a box's memory, the largest context and number of users that fit, and the vLLM flags that ask
for the same. Bytes are those of `sizes`; here is what engines and boxes add to them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from stoker.errors import RequestError
from stoker.plan.catalog import GIB, Box, read
from stoker.plan.models import Model
from stoker.plan.vllm_pool import Pool, pool_of
from stoker.sizes.memory import KV_ITEM, Caches, Item, caches_of, plan_memory
from stoker.sizes.step import DFLASH, MTP_DRAFT, Draft
from stoker.sizes.weights import WeightBytes
from stoker.weights.model_config import FULL, LINEAR, SLIDING
from stoker.weights.names import MTP, VISION

KV = ("bf16", "fp8")
MOST_USERS = 4096
SAFE_UNIFIED, SAFE_CARD = 0.82, 0.90  # shares for one engine; 0.82 of a Spark leaves 22 GiB to all else
SWAPS_ABOVE = 0.88  # of unified memory, for one engine: above it boxes were seen to swap


@dataclass(frozen=True)
class EngineNeeds:
    key: str
    title: str
    runtime_gib: float
    graphs_gib: float
    host_gib: float
    vision: bool
    source: str
    cpu: dict[str, Any] = field(default_factory=dict)  # what is different where the processor computes

    def on(self, box: Box) -> "EngineNeeds":
        return replace(self, **self.cpu) if box.architecture == "cpu" else self


@dataclass(frozen=True)
class Ask:
    """What is to be served."""

    context: int
    users: int
    draft: Draft
    kv: str  # bf16 or fp8
    engine: str
    prefix_cache_gib: float = 0.0


@dataclass(frozen=True)
class Budget:
    items: tuple[Item, ...]
    capacity: int  # what the box shows
    max_context: int  # with the users asked for; 0: none fits
    max_users: int  # at the context asked for
    pool: Pool | None  # vLLM only
    flags: tuple[str, ...]

    @property
    def total(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def free_bytes(self) -> int:
        return self.capacity - self.total

    @property
    def fits(self) -> bool:
        return self.free_bytes >= 0

    def sum_of(self, *starts: str) -> int:
        return sum(item.bytes for item in self.items if item.name.startswith(starts))


@cache
def engines() -> dict[str, EngineNeeds]:
    return {key: EngineNeeds(key, **entry) for key, entry in read("engines.toml").items()}


def find_engine(name: str) -> EngineNeeds:
    by_plain = {key.lower().replace(".", ""): needs for key, needs in engines().items()}
    wanted = name.lower().replace(".", "")
    if wanted not in by_plain:
        raise RequestError(f"unknown engine {name!r}; known engines: {', '.join(engines())}.")
    return by_plain[wanted]


def check(model: Model, ask: Ask) -> None:
    """Refuses what no amount of memory would mend."""
    if ask.context < 1 or ask.users < 1:
        raise RequestError(f"context is {ask.context:,} and users {ask.users:,}; both are at least 1.")
    if ask.context > model.max_positions:
        raise RequestError(
            f"a context of {ask.context:,} tokens is {ask.context - model.max_positions:,} more than "
            f"{model.name} has positions for ({model.max_positions:,}). Ask for at most that."
        )
    if ask.kv not in KV:
        raise RequestError(f"KV is stored as bf16 or fp8, not as {ask.kv!r}.")
    if ask.draft.kind == MTP_DRAFT and not model.mtp_layers:
        raise RequestError(f"{model.name} has no MTP head; plan without drafting, or with --draft lookup:K.")
    if ask.draft.kind == DFLASH and not model.drafter:
        raise RequestError(f"no DFlash drafter of {model.name} is known; plan with --draft mtp:K or without drafting.")
    if ask.draft.kind == DFLASH and model.drafter and ask.draft.depth >= model.drafter.block_size:
        raise RequestError(
            f"{model.drafter.repository} drafts blocks of {model.drafter.block_size}: at most "
            f"{model.drafter.block_size - 1} tokens a step, and {ask.draft.depth} were asked for."
        )


def budget(model: Model, weights: WeightBytes, box: Box, ask: Ask, utilization: float | None = None) -> Budget:
    check(model, ask)
    caches = caches_of(model, ask.engine, ask.kv, ask.draft, cpu=box.architecture == "cpu")
    loaded, beside = _loaded(model, weights, ask), _beside(caches, box, ask)
    plan = plan_memory(caches, loaded, beside, context=ask.context, users=ask.users)
    room = box.visible_bytes - sum(item.bytes for item in (*loaded, *beside))
    max_context = _largest(model.max_positions, lambda n: caches.total(n, ask.users) <= room)
    max_users = _largest(MOST_USERS, lambda n: caches.total(ask.context, n) <= room)
    pool: Pool | None = None
    flags: tuple[str, ...] = ()
    if ask.engine == "vLLM" and any(model.layers_of(kind) for kind in (FULL, LINEAR, SLIDING)):
        pool, flags = _vllm(model, box, ask, plan.items, utilization)
    return Budget(plan.items, box.visible_bytes, max_context, max_users, pool, flags)


def _loaded(model: Model, weights: WeightBytes, ask: Ask) -> list[Item]:
    items = []
    for group, size in weights.groups.items():
        if group == MTP and ask.draft.kind != MTP_DRAFT:
            continue  # engines load it only where it drafts
        if group == VISION and not engines()[ask.engine].vision:
            continue
        kind = weights.formats.get(group, "")
        items.append(Item(f"weights: {group}", size, f"{kind}, {'exact' if weights.exact else 'an average'}"))
    if ask.draft.kind == DFLASH and model.drafter:
        size = 2 * model.drafter.parameters
        items.append(Item("drafter: DFlash", size, f"{model.drafter.parameters:,} parameters x 2 bytes"))
    return items


def _beside(caches: Caches, box: Box, ask: Ask) -> list[Item]:
    needs, items = engines()[ask.engine].on(box), []
    if ask.prefix_cache_gib:
        size, each = int(ask.prefix_cache_gib * GIB), caches.snapshot
        held = f", {size // each} snapshots of {each:,} bytes" if each else ""
        items.append(Item("prefix cache", size, f"as asked{held}"))
    if needs.graphs_gib:
        items.append(Item("graphs", int(needs.graphs_gib * GIB), needs.source))
    items.append(Item("runtime", int(needs.runtime_gib * GIB), "activations, workspaces, allocator"))
    if box.unified:
        items.append(
            Item("host process", int(needs.host_gib * GIB), "container, Python, scheduler, in the same memory")
        )
    items.append(Item("reserve", box.reserve_bytes, "operating system" if box.unified else "driver and display"))
    return items


def _vllm(
    model: Model, box: Box, ask: Ask, items: Sequence[Item], utilization: float | None
) -> tuple[Pool, tuple[str, ...]]:
    needs = engines()["vLLM"].on(box)
    loaded = sum(item.bytes for item in items if item.name.startswith(("weights", "drafter")))
    beside = int((needs.runtime_gib + needs.graphs_gib) * GIB)
    wanted = sum(item.bytes for item in items if item.name.startswith(("KV", "recurrent")))
    depth = ask.draft.depth if ask.draft.drafting else 0

    def pool_at(share: float) -> Pool:
        bytes_left = max(0, int(box.visible_bytes * share) - loaded - beside)
        return pool_of(model, bytes_left, context=ask.context, depth=depth, kv_item=KV_ITEM[ask.kv],
                       mtp=ask.draft.kind == MTP_DRAFT)  # fmt: skip

    if utilization is None:  # what is safe; more, in hundredths, only if not all users' contexts fit
        least = (loaded + beside + wanted) / box.visible_bytes
        safe = SAFE_UNIFIED if box.unified else SAFE_CARD
        shares = [share / 100 for share in range(max(round(100 * safe), int(least * 100)), 96)] or [0.95]
        utilization = next((share for share in shares if pool_at(share).concurrency >= ask.users), shares[-1])
    pool = pool_at(utilization)
    flags = [
        f"--gpu-memory-utilization {utilization:.2f}",
        f"--max-model-len {ask.context}",
        f"--max-num-seqs {ask.users}",
        f"--kv-cache-memory-bytes {pool.bytes}",
    ]
    if ask.kv == "fp8":
        flags.append("--kv-cache-dtype fp8")
    if ask.draft.kind == MTP_DRAFT:
        flags.append(f'--speculative-config \'{{"method":"mtp","num_speculative_tokens":{ask.draft.depth}}}\'')
    if ask.draft.kind == DFLASH and model.drafter:
        config = (
            f'{{"method":"dflash","model":"{model.drafter.repository}","num_speculative_tokens":{ask.draft.depth}}}'
        )
        flags.append(f"--speculative-config '{config}'")
    if box.devices > 1:
        flags.append(f"--tensor-parallel-size {box.devices}")
    return pool, tuple(flags)


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest n of 1 ... most for which it holds, 0 if for none; it holds below any n for which it holds."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
