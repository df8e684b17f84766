"""What a step reads: weights by group, experts by how many tokens are verified, states, keys and values, drafts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from stoker.sizes.network import Network
from stoker.sizes.weights import WeightBytes
from stoker.weights.names import DELTANET, EMBEDDING, ROUTED

MTP_DRAFT, DFLASH = "mtp", "dflash"


@dataclass(frozen=True)
class Draft:
    """What drafts: `none`, `mtp`, `dflash` or `lookup`, and how many tokens a step."""

    kind: str = "none"
    depth: int = 0

    @property
    def drafting(self) -> bool:
        return self.kind != "none" and self.depth > 0

    @property
    def verified(self) -> int:
        """Tokens of one sequence in a verify step."""
        return 1 + (self.depth if self.drafting else 0)

    def __str__(self) -> str:
        return f"{self.kind}:{self.depth}" if self.drafting else "none"


@dataclass(frozen=True)
class StepReads:
    items: dict[str, float]  # what the verify step reads, by name
    draft_items: dict[str, float]
    passes: int  # forwards of the drafter before it
    distinct_experts: float  # per layer

    @property
    def verify(self) -> float:
        return sum(self.items.values())

    @property
    def draft(self) -> float:
        return sum(self.draft_items.values())

    @property
    def total(self) -> float:
        return self.verify + self.draft


def distinct_experts(tokens: float, top_k: int, pool: float) -> float:
    """Experts per layer that `tokens` tokens touch, each choosing `top_k` of `pool` by itself."""
    if not top_k:
        return 0.0
    pool = max(pool, float(top_k))
    return pool * (1.0 - (1.0 - top_k / pool) ** tokens)


def step_reads(
    network: Network, weights: WeightBytes, draft: Draft, *, context: int, users: int, pool: float, kv_item: float
) -> StepReads:
    """`pool`: experts per layer that the tokens of a text choose among; all of them if routing were independent."""
    tokens = users * draft.verified
    distinct = min(distinct_experts(tokens, network.top_k, pool), network.experts)
    items: dict[str, float] = dict(weights.fixed)
    if network.experts:
        items[ROUTED] = weights.groups[ROUTED] * distinct / network.experts
    if state := network.recurrent_bytes + network.conv_bytes():
        items["recurrent state"] = 2.0 * users * state  # read and written
    items["KV cache"] = float(users * network.kv_bytes(context, kv_item))
    drafted, passes = _draft_reads(network, weights, draft, context, users, kv_item)
    return StepReads({k: float(v) for k, v in items.items() if v}, drafted, passes, distinct)


def _draft_reads(
    network: Network, weights: WeightBytes, draft: Draft, context: int, users: int, kv_item: float
) -> tuple[dict[str, float], int]:
    if not draft.drafting:
        return {}, 0
    if draft.kind == MTP_DRAFT:
        chosen = distinct_experts(users, network.top_k, network.experts) / network.experts if network.experts else 0.0
        each = {
            "MTP layer": weights.mtp_fixed + weights.mtp_experts * chosen,
            "head, for drafts": float(weights.head),
            "MTP KV": float(users * network.mtp_kv_bytes(context, kv_item)),
        }
        return {name: draft.depth * size for name, size in each.items() if size}, draft.depth
    if draft.kind == DFLASH and network.drafter:
        return {
            "DFlash drafter": 2.0 * network.drafter.parameters,
            "head, for drafts": float(weights.head),
            "DFlash KV": float(users * network.drafter.kv_bytes(context, 2.0)),
        }, 1
    return {}, 0


@dataclass(frozen=True)
class TokenReads:
    """One token of one sequence, without drafting and without KV cache, which grows with the context."""

    items: Mapping[str, int]  # a group, or a state that is read and written -> bytes
    kv_bytes_per_token: int  # of context, in BF16
    draft_bytes: int  # for one token drafted by MTP: its layer and the head; 0 without MTP

    @classmethod
    def of(cls, network: Network, weights: WeightBytes) -> Self:
        routed = weights.groups.get(ROUTED, 0) * network.top_k // network.experts if network.experts else 0
        items = {ROUTED: routed, **weights.fixed}
        items = {group: size for group, size in items.items() if size}
        items[EMBEDDING] = weights.groups.get(EMBEDDING, 0) // network.vocab_size  # one row
        if network.delta and DELTANET in weights.groups:
            items["DeltaNet state"] = 2 * network.recurrent_bytes  # read and written
            items["DeltaNet conv state"] = 2 * network.conv_bytes()
        draft = weights.mtp_read(network.top_k, network.experts)
        return cls(items, int(network.kv_bytes_per_token(2)), draft + weights.head if draft else 0)

    @property
    def total(self) -> int:
        return sum(self.items.values())
