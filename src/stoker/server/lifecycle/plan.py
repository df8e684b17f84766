"""How large an engine the server starts, from what it was asked for and what the machine has to give."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.backends.family import PAGE_SIZE
from stoker.engine.config import EngineConfig
from stoker.errors import RequestError
from stoker.server.config import ServerConfig
from stoker.server.lifecycle.memory_guard import Reading
from stoker.sizes.memory import Caches, Item, MemoryPlan, caches_of, plan_memory, size
from stoker.sizes.network import Drafter, Network
from stoker.sizes.step import DFLASH, MTP_DRAFT, Draft
from stoker.speculate.choice import DRAFTER_FOLDER, DraftChoice
from stoker.weights.checkpoint import Checkpoint, odd_files
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import ModelConfig
from stoker.weights.problems import refuse_errors
from stoker.weights.resolve import resolve_model

if TYPE_CHECKING:
    from stoker.backends.network.decoder import Decoder
    from stoker.backends.network.load import Loaded

LEAST_CONTEXT = 4096  # tokens of one request below which nobody is served unless they asked for it
SHARED_CONTEXT = 32768  # of all but one request, where nobody says how long they get
RUNTIME = 768 << 20  # bytes of two Python processes; with a GPU there is torch in both
HOST_RUNTIME = 3 << 30  # bytes of the host's beside a card: two processes that use CUDA, and those that compile kernels
STAGED = 512 << 20  # bytes of the host's that weights lie in on their way to a card
PACKED = 2.0  # what a weight becomes on a CPU, at most: 8 bits as 16
MOST_PROMPT, LEAST_PROMPT = 8192, 512  # tokens that a GPU computes of prompts at a time
PROMPT_SHARE = 32  # and the part of the room that buffers for them may take: one in so many bytes
COPIES_SHARE = 6  # and of what weights leave, that 16-bit copies of dense ones may take


@dataclass(frozen=True)
class Plan:
    """The engine's sizes, and where the memory goes."""

    engine: EngineConfig
    context: int  # most tokens of one request
    memory: MemoryPlan
    cache_bytes: int  # what the engine's own caches take, its drafter's apart
    reading: Reading
    reserve: int

    @property
    def items(self) -> tuple[Item, ...]:
        return self.memory.items

    @property
    def total(self) -> int:
        return self.memory.total

    @property
    def kv_bytes(self) -> int:
        return self.memory.sum_of("KV cache")

    @property
    def state_bytes(self) -> int:
        """Recurrent states of requests and of the prefix cache."""
        return self.memory.sum_of("recurrent state", "prefix cache")


def plan_engine(config: ServerConfig, reading: Reading) -> Plan:
    """Refuses, with the numbers, what does not fit beside the reserve."""
    model = ModelConfig.load(config.directory)
    refuse_errors(odd_files(config.directory), config.directory)  # the tokenizer is read next
    context = config.context or model.max_positions
    if config.context and config.context > model.max_positions:
        raise RequestError(f"--context is {config.context:,}, and the model was made for {model.max_positions:,}.")
    # dense models have no kernels of their own on an accelerator
    on_gpu = config.device.startswith("cuda") and model.moe is not None
    hollow = _hollow(config.directory) if on_gpu else None
    mtp = hollow.model.mtp is not None if hollow else _has_mtp(config.directory, model)
    choice = DraftChoice.parse(config.draft).resolved(mtp, config.directory)
    caches = _caches(config, model, choice, on_gpu)
    least = caches.pages(context)
    shared = least if config.context else min(least, SHARED_CONTEXT // PAGE_SIZE)
    wanted = least + (config.users - 1) * shared
    if hollow and reading.host is not None:
        _check_host(config, reading, reading.host, hollow.largest)
    reserve = reading.reserve if config.reserve is None else config.reserve
    room = max(0, reading.available - reserve)
    if config.memory is not None:
        room = min(room, config.memory)
    sizes = EngineConfig(
        wanted, config.users, choice.depth, prefill_pause=config.prompt_pause, snapshots=1, kv_dtype=config.kv_dtype
    )
    if hollow:
        weights, buffers, sizes = _on_gpu(config, choice, sizes, room, hollow.model)
    else:
        weights, buffers = _weight_bytes(config), []

    def planned(context: int) -> MemoryPlan:
        # beside a card with memory of its own, processes are the host's affair
        loaded = [Item("weights", weights), *([Item("runtime", RUNTIME)] if reading.host is None else [])]
        return plan_memory(
            caches, loaded, buffers, context=context, users=config.users, pages=wanted,
            prefix_cache=config.prefix_cache, budget=room,
        )  # fmt: skip

    memory = planned(context)
    if not config.context and LEAST_CONTEXT <= memory.pages * PAGE_SIZE < context:
        context = memory.pages * PAGE_SIZE
        memory = planned(context)
    if not memory.fits:
        parts = ", ".join(f"{item} {size(item.bytes)}" for item in memory.items)
        where = "" if reading.host is None else " on the card"
        raise RequestError(
            f"one request of {context:,} tokens does not fit: {parts} are {size(memory.total)}, and of "
            f"{size(reading.available)} available{where} {size(reserve)} stay free for the system, which leaves "
            f"{size(room)}. Ask for a shorter --context or fewer --users, store KV as --kv-dtype fp8, or lower "
            "--reserve."
        )
    sizes = replace(sizes, pages=memory.pages, snapshots=memory.snapshots, assumed_tokens=config.assume_acceptance)
    own = caches.own(sizes.pages, sizes.slots, sizes.snapshots)
    return Plan(sizes, context, memory, own, reading, reserve)


def _hollow(directory: Path) -> "Loaded":
    """The model without its weights. Only a server on a GPU needs torch in its own process."""
    from stoker.backends.network.load import load_model

    return load_model(directory, device="meta")


def _has_mtp(directory: Path, model: ModelConfig) -> bool:
    """Whether the weights have the MTP head that config.json announces."""
    return model.mtp_layers > 0 and resolve_model(model, Checkpoint.open(directory)).has_mtp


def _caches(config: ServerConfig, model: ModelConfig, choice: DraftChoice, on_gpu: bool) -> Caches:
    drafter = None
    kind = next((kind for kind in (DFLASH, MTP_DRAFT) if kind in choice.kinds), "lookup")
    if kind == DFLASH:
        drafter = Drafter.of(DFlashConfig.load(config.directory / DRAFTER_FOLDER))
    activation = 2 if on_gpu else model.dtype_bytes
    kv = config.kv_dtype or {2: "bf16", 4: "fp32"}[activation]
    network = Network.of(model, drafter=drafter)
    return caches_of(network, "stoker", kv, Draft(kind, choice.depth), cpu=not on_gpu, activation=activation)


def _check_host(config: ServerConfig, reading: Reading, host: Reading, largest: int) -> None:
    """Refuses a host without room for the processes and for what passes through it while weights are read: the reader
    holds up to two of the largest tensors."""
    reserve = reading.host_reserve if config.reserve is None else config.reserve
    needed = HOST_RUNTIME + 2 * largest + STAGED
    if host.available - reserve < needed:
        raise RequestError(
            f"the host has {size(host.available)} of memory available, of which {size(reserve)} stay free for the "
            f"system; two processes with CUDA and the buffers of loading need {size(needed)} of it beside the card. "
            "End other programs, or lower --reserve."
        )


def _on_gpu(
    config: ServerConfig, choice: DraftChoice, sizes: EngineConfig, room: int, hollow: "Decoder"
) -> tuple[int, list[Item], EngineConfig]:
    """Packed weights and buffers, measured, and the engine they are for. Pages are those that are wanted: if fewer fit,
    contexts are shorter and need no more. Prompts are computed in as large chunks as their share of the room allows,
    and from copies of dense weights that need no unpacking if the room is ample."""
    from stoker.backends.gpu.measure import measure

    wanted = replace(sizes, prefill_budget=MOST_PROMPT, dense_copies=True)
    found = measure(config.directory, wanted, choice, hollow)
    chunk, copies = MOST_PROMPT, found.copies <= (room - found.weights) / COPIES_SHARE
    while chunk > LEAST_PROMPT and found.prompts * chunk / MOST_PROMPT > room / PROMPT_SHARE:
        chunk //= 2
    sizes = replace(wanted, prefill_budget=chunk, dense_copies=copies)
    if sizes != wanted:
        found = measure(config.directory, sizes, choice)
    buffers = [
        Item("dense weights once more, in 16 bit for prompts", found.copies),
        Item("buffers of steps", found.steps),
        Item(f"buffers of prompts, {sizes.prefill_budget:,} tokens at a time", found.prompts),
        Item("buffers of drafting", found.drafter),
        Item("CUDA, kernels, graphs, sampling (assumed)", found.graphs),
    ]
    return found.weights, [item for item in buffers if item.bytes], sizes


def _weight_bytes(config: ServerConfig) -> int:
    files = sum(file.stat().st_size for file in config.directory.rglob("*.safetensors"))
    return int(files * PACKED) if config.device == "cpu" else files
