"""How large an engine the server starts, from what it was asked for and what the machine has to give."""

from dataclasses import dataclass
from pathlib import Path

from stoker.backends.cpu.load import config_dtype
from stoker.backends.cpu.measure import DrafterBytes, unit_bytes
from stoker.backends.family import PAGE_SIZE
from stoker.engine.config import EngineConfig
from stoker.engine.memory import UnitBytes, size
from stoker.errors import RequestError
from stoker.server.config import ServerConfig
from stoker.server.lifecycle.memory_guard import Reading
from stoker.speculate.choice import DRAFTER_FOLDER, DraftChoice
from stoker.weights.checkpoint import odd_files
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import ModelConfig
from stoker.weights.problems import refuse_errors

LEAST_CONTEXT = 4096  # tokens of one request below which nobody is served unless they asked for it
SHARED_CONTEXT = 32768  # of all but one request, where nobody says how long they get
RUNTIME = 768 << 20  # bytes of two Python processes, torch in both
PACKED = 2.0  # what a weight becomes on a CPU, at most: 8 bits as 16
STATES_PER_USER = 16  # recurrent states the prefix cache keeps, where memory allows
CACHE_SHARE = 0.2  # of the memory for caches that those may take


Items = tuple[tuple[str, int], ...]  # name and bytes
Needs = tuple[int, UnitBytes, UnitBytes, Items]  # weights; a page, slot and state without and with the drafter's; more


@dataclass(frozen=True)
class Plan:
    """The engine's sizes, and where the memory goes."""

    engine: EngineConfig
    context: int  # most tokens of one request
    items: Items
    cache_bytes: int  # of the items, what the engine's own caches take
    kv_bytes: int
    state_bytes: int  # recurrent states of requests and of the prefix cache
    reading: Reading
    reserve: int

    @property
    def total(self) -> int:
        return sum(count for _, count in self.items)


def plan_engine(config: ServerConfig, reading: Reading) -> Plan:
    """Refuses, with the numbers, what does not fit beside the reserve."""
    model = ModelConfig.load(config.directory)
    refuse_errors(odd_files(config.directory), config.directory)  # the tokenizer is read next
    context = config.context or model.max_positions
    if config.context and config.context > model.max_positions:
        raise RequestError(f"--context is {config.context:,}, and the model was made for {model.max_positions:,}.")
    choice = DraftChoice.parse(config.draft)
    slots, each = config.users, -(-context // PAGE_SIZE)
    wanted = each * slots if config.context else each + (slots - 1) * min(each, SHARED_CONTEXT // PAGE_SIZE)
    # dense models have no kernels of their own on an accelerator
    needs = _on_gpu if config.device.startswith("cuda") and model.moe is not None else _on_cpu
    weights, own, unit, buffers = needs(config, model, choice, wanted)
    reserve = reading.reserve if config.reserve is None else config.reserve
    room = max(0, reading.available - reserve)
    if config.memory is not None:
        room = min(room, config.memory)
    budget = room - weights - RUNTIME - sum(count for _, count in buffers)
    if config.prefix_cache is None:
        states = min(STATES_PER_USER * slots, int(max(0, budget) * CACHE_SHARE) // (unit.checkpoint or unit.page))
    else:
        states = config.prefix_cache // (unit.checkpoint or unit.page)
    fixed = slots * unit.slot + states * unit.checkpoint
    pages = min(wanted, (budget - fixed) // unit.page)
    if not config.context and LEAST_CONTEXT <= pages * PAGE_SIZE < context:
        context, each = pages * PAGE_SIZE, pages
    sizes = EngineConfig(max(1, pages), slots, choice.depth, checkpoints=states, kv_dtype=config.kv_dtype)
    items = (
        ("weights", weights),
        ("runtime", RUNTIME),
        (f"KV of {max(each, pages) * PAGE_SIZE:,} tokens", max(each, pages) * unit.page),
        (f"recurrent state of {slots} requests", slots * unit.slot),
        (f"prefix cache, {states} states", states * unit.checkpoint),
        *buffers,
    )
    plan = Plan(sizes, context, items, own.total(sizes), max(each, pages) * unit.page, fixed, reading, reserve)
    if pages < each:
        parts = ", ".join(f"{name} {size(count)}" for name, count in items)
        raise RequestError(
            f"one request of {context:,} tokens does not fit: {parts} are {size(plan.total)}, and of "
            f"{size(reading.available)} available {size(reserve)} stay free for the system, which leaves {size(room)}. "
            "Ask for a shorter --context or fewer --users, store KV as --kv-dtype fp8, or lower --reserve."
        )
    return plan


def _on_cpu(config: ServerConfig, model: ModelConfig, choice: DraftChoice, pages: int) -> Needs:
    dtype = config_dtype(model)
    drafter = _drafter_bytes(choice, model, config.directory)
    own = unit_bytes(model, choice.depth, dtype, None, config.kv_dtype)
    return _weight_bytes(config), own, unit_bytes(model, choice.depth, dtype, drafter, config.kv_dtype), ()


def _on_gpu(config: ServerConfig, model: ModelConfig, choice: DraftChoice, pages: int) -> Needs:
    """Buffers are those for `pages`; if fewer fit, their contexts are shorter and they need no more."""
    from stoker.backends.gpu.measure import measure

    sizes = EngineConfig(pages, config.users, choice.depth, checkpoints=1, kv_dtype=config.kv_dtype)
    found = measure(config.directory, sizes, choice)
    buffers = [
        ("buffers of steps", found.steps),
        (f"buffers of prompts, {sizes.prefill_budget:,} tokens at a time", found.prompts),
        ("buffers of drafting", found.drafter),
        ("CUDA, kernels, graphs, sampling (assumed)", found.graphs),
    ]
    shown = tuple((name, count) for name, count in buffers if count)
    return found.weights, found.units(drafter=False), found.units(drafter=True), shown


def _weight_bytes(config: ServerConfig) -> int:
    files = sum(file.stat().st_size for file in config.directory.rglob("*.safetensors"))
    return int(files * PACKED) if config.device == "cpu" else files


def _drafter_bytes(choice: DraftChoice, model: ModelConfig, directory: Path) -> DrafterBytes:
    """What the drafter keeps per page and slot; `auto` takes a DFlash network where there is one."""
    folder = directory / DRAFTER_FOLDER
    dtype = config_dtype(model)
    if "dflash" in choice.kinds or (choice.best and folder.is_dir()):
        return DrafterBytes.dflash(DFlashConfig.load(folder), dtype) if folder.is_dir() else DrafterBytes()
    return DrafterBytes.mtp(model, dtype) if choice.best or "mtp" in choice.kinds else DrafterBytes()
