"""What engines keep of requests, and one plan of where the memory goes: `stoker plan`, `stoker serve` and the engine
take from it what they need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stoker.backends.family import PAGE_SIZE, STEP_CHUNK
from stoker.sizes.network import Network
from stoker.sizes.step import DFLASH, MTP_DRAFT, Draft
from stoker.weights.model_config import FULL, LINEAR, SLIDING

KV_ITEM = {"fp32": 4, "bf16": 2, "fp8": 1}
GPU_PREPARED, GPU_NUMBERS = 8, 4  # tokens that the GPU's DeltaNet kernel prepares at a time, and numbers of each
KV_SCALE = 2  # Stoker's FP8 has a BF16 scale per token and head, of keys and of values


@dataclass(frozen=True)
class Caches:
    """Bytes that an engine keeps: for each token, in whole pages, for each request, and for each snapshot."""

    page_tokens: int
    token: int  # keys and values of the trunk's full layers
    slot: int  # of one request, whatever its length: recurrent states and what they are computed from
    how: Mapping[str, str]  # "KV cache", "slot" and "drafter" -> what it is made of, in words
    snapshot: int = 0  # a copy of recurrent states to go back to
    windowed_token: int = 0  # keys and values of layers that keep the last `window` tokens alone
    window: int = 0
    draft_token: int = 0  # the drafter's keys and values
    windowed_draft_token: int = 0
    draft_window: int = 0
    draft_slot: int = 0  # what the drafter keeps of one request beside
    drafter: str = ""  # as items are named after it

    @property
    def page(self) -> int:
        """With the drafter's. Where a layer keeps a window, a request takes less than its pages."""
        return self.page_tokens * (self.token + self.draft_token)

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def kv(self, tokens: int) -> int:
        """Of one sequence."""
        held = self.pages(tokens) * self.page_tokens
        return held * self.token + min(held, self.window) * self.windowed_token

    def draft_kv(self, tokens: int) -> int:
        held = self.pages(tokens) * self.page_tokens
        return held * self.draft_token + min(held, self.draft_window) * self.windowed_draft_token

    def total(self, tokens: int, requests: int) -> int:
        """Of so many requests of so many tokens."""
        return requests * (self.kv(tokens) + self.draft_kv(tokens) + self.slot + self.draft_slot)

    def own(self, pages: int, slots: int, snapshots: int) -> int:
        """What an engine allocates for these, its drafter's part apart."""
        return pages * self.page_tokens * self.token + slots * self.slot + snapshots * self.snapshot

    def items(self, tokens: int, requests: int, slots: int) -> list["Item"]:
        """Keys and values of `requests` of so many tokens, and what `slots` of them keep whatever their length."""
        each = f"{f'{requests} x ' if requests > 1 else ''}{self.pages(tokens) * self.page_tokens:,} tokens"
        found = [Item("KV cache", requests * self.kv(tokens), f"{each}, {self.how['KV cache']}")]
        if self.drafter:
            found.append(
                Item(f"KV cache: {self.drafter}", requests * self.draft_kv(tokens), f"{each}, {self.how['drafter']}")
            )
        if one := self.slot + self.draft_slot:
            found.append(Item("recurrent state", slots * one, f"{slots} x {one:,} bytes: {self.how['slot']}"))
        return found


def caches_of(
    network: Network, engine: str, kv: str, draft: Draft, *, cpu: bool = False, activation: int = 2
) -> Caches:
    """`cpu` is Stoker's own backend for it; `activation` is the size of a number that the network computes with."""
    stoker = engine == "stoker"
    attention = network.layers_of(FULL) + network.layers_of(SLIDING)

    def scales(layers: int) -> int:
        return layers * 2 * network.num_kv_heads * KV_SCALE if stoker and kv == "fp8" else 0

    slot, how = _state(network, engine, draft.verified - 1, cpu, activation)
    found = Caches(
        page_tokens=PAGE_SIZE if stoker else 1,
        token=int(network.kv_bytes_per_token(KV_ITEM[kv])) + scales(network.layers_of(FULL)),
        windowed_token=int(network.kv_bytes_per_token(KV_ITEM[kv], SLIDING)) + scales(network.layers_of(SLIDING)),
        window=network.sliding_window,
        slot=slot,
        snapshot=network.recurrent_bytes + network.conv_bytes(item=activation),
        how={"KV cache": f"{kv}, {attention} attention layers", "slot": how},
    )
    if draft.kind == MTP_DRAFT:  # Stoker keeps the head's keys and values as the network computes them
        return replace(
            found,
            drafter="MTP",
            draft_token=network.mtp_kv_bytes(1, activation if stoker else KV_ITEM[kv]),
            draft_slot=network.hidden_size * activation if stoker and cpu else 0,
            how={**found.how, "drafter": "one layer"},
        )
    if draft.kind == DFLASH and (own := network.drafter):
        each = 2 * own.num_key_value_heads * own.head_dim * activation
        sliding = 0 if stoker else own.sliding_layers  # Stoker's pages keep what is behind the window too
        return replace(
            found,
            drafter="DFlash",
            draft_token=(own.layers - sliding) * each,
            windowed_draft_token=sliding * each,
            draft_window=own.sliding_window,
            how={**found.how, "drafter": f"{own.layers} layers, {sliding} of them sliding"},
        )
    return found


def _state(network: Network, engine: str, depth: int, cpu: bool, activation: int) -> tuple[int, str]:
    """Of one request, and how engines differ: vLLM keeps a state per draft, Stoker the inputs of tokens to replay."""
    if (d := network.delta) is None:
        return 0, ""
    kernel, layers = d.conv_kernel, network.layers_of(LINEAR)
    if engine in ("vLLM", "SGLang"):
        return (1 + depth) * (network.recurrent_bytes + network.conv_bytes(kernel - 1 + depth)), f"{1 + depth} states"
    if engine != "stoker":
        return network.recurrent_bytes + network.conv_bytes(), "one state"
    if cpu:  # q, k, v and gates in fp32 beside what goes into the convolution
        ring = cpu_ring(1 + depth, kernel)
        token = d.conv_channels * activation + 4 * (d.conv_channels + 2 * d.value_heads)
        return network.recurrent_bytes + layers * ring * token, f"one state and a ring of {ring} inputs"
    ring = gpu_ring(1 + depth, kernel)
    token = d.conv_channels * 2 + 2 * 4 * d.value_heads
    scratch = d.value_heads * GPU_PREPARED * 4 * (2 * d.key_dim + 2 * d.value_dim + GPU_NUMBERS)
    how = f"one state, a ring of {ring} inputs, and a kernel's scratch"
    return network.recurrent_bytes + layers * ring * token + scratch, how


def cpu_ring(window: int, kernel: int) -> int:
    """Places for steps of up to `window` tokens: the rest of a chunk before them, and a convolution's reach."""
    return -(-(max(STEP_CHUNK, kernel) - 1 + window) // STEP_CHUNK) * STEP_CHUNK


def gpu_ring(window: int, kernel: int) -> int:
    """Places for replayed tokens, the convolution's reach before them and the new tokens, none of which may meet."""
    return -(-(2 * window + kernel - 1) // 8) * 8


SNAPSHOTS_PER_USER = 16  # recurrent states the prefix cache keeps, where memory allows
SNAPSHOT_SHARE = 0.2  # of the memory for caches that those may take if nobody says how much


@dataclass(frozen=True)
class Item:
    name: str
    bytes: int
    how: str = ""  # the arithmetic

    def __str__(self) -> str:
        return f"{self.name} ({self.how})" if self.how else self.name


@dataclass(frozen=True)
class MemoryPlan:
    items: tuple[Item, ...]
    pages: int  # that the budget buys, of those wanted
    snapshots: int  # of recurrent states, for the prefix cache
    fits: bool  # at least one request of the context asked for

    @property
    def total(self) -> int:
        return sum(item.bytes for item in self.items)

    def sum_of(self, *starts: str) -> int:
        return sum(item.bytes for item in self.items if item.name.startswith(starts))


def plan_memory(
    caches: Caches,
    loaded: Sequence[Item],
    beside: Sequence[Item] = (),
    *,
    context: int,
    users: int,
    pages: int | None = None,
    prefix_cache: int | None = 0,
    budget: int | None = None,
) -> MemoryPlan:
    """Weights and the like (`loaded`), caches, and what an engine takes `beside`, within `budget` bytes if given.

    `pages` are shared by all users; None: a context for each. `prefix_cache` is its bytes; None: a share of the rest.
    Where not even one request of `context` tokens fits, the items are those of one.
    """
    snapshot = caches.snapshot or caches.page or 1  # without recurrent layers the prefix cache only pins pages
    room = max(0, (budget or 0) - sum(item.bytes for item in (*loaded, *beside)))
    if prefix_cache is None:
        snapshots = min(SNAPSHOTS_PER_USER * users, int(room * SNAPSHOT_SHARE) // snapshot)
    else:
        snapshots = prefix_cache // snapshot
    kept = snapshots * caches.snapshot
    least = caches.pages(context)
    if budget is not None:
        fixed = users * (caches.slot + caches.draft_slot) + kept
        pages = min(least * users if pages is None else pages, (room - fixed) // caches.page)
    if pages is None:
        items = caches.items(context, users, users)
    else:
        items = caches.items(max(least, pages) * caches.page_tokens, 1, users)
    if kept:
        items.append(Item("prefix cache", kept, f"{snapshots} x {caches.snapshot:,} bytes: recurrent states"))
    pages = least * users if pages is None else pages
    return MemoryPlan((*loaded, *items, *beside), pages, snapshots, pages >= least)


def size(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024.0:
            break
        value, unit = value / 1024.0, larger
    return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
