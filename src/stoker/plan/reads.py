"""Bytes that one step moves: weights by group, experts by how many tokens are verified, states, KV, and the drafts."""

from dataclasses import dataclass

from stoker.plan.shapes import Model
from stoker.plan.weigh import Weighed
from stoker.weights.groups import MTP, ROUTED

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
    model: Model, weights: Weighed, draft: Draft, *, context: int, users: int, pool: float, kv_item: float
) -> StepReads:
    """`pool`: experts per layer that the tokens of a text choose among; all of them if routing were independent."""
    tokens = users * draft.verified
    distinct = min(distinct_experts(tokens, model.top_k, pool), model.experts)
    items: dict[str, float] = dict(weights.fixed_reads())
    if model.experts:
        items[ROUTED] = weights.groups[ROUTED] * distinct / model.experts
    if state := model.recurrent_bytes + model.conv_bytes():
        items["recurrent state"] = 2.0 * users * state  # read and written
    items["KV cache"] = float(users * model.kv_bytes(context, kv_item))
    drafted, passes = _draft_items(model, weights, draft, context, users, kv_item)
    return StepReads({k: float(v) for k, v in items.items() if v}, drafted, passes, distinct)


def _draft_items(
    model: Model, weights: Weighed, draft: Draft, context: int, users: int, kv_item: float
) -> tuple[dict[str, float], int]:
    if not draft.drafting:
        return {}, 0
    if draft.kind == MTP_DRAFT:
        own = weights.groups.get(MTP, 0) - weights.mtp_experts
        chosen = distinct_experts(users, model.top_k, model.experts) / model.experts if model.experts else 0.0
        each = {
            "MTP layer": own + weights.mtp_experts * chosen,
            "head, for drafts": float(weights.head),
            "MTP KV": float(users * model.mtp_kv_bytes(context, kv_item)),
        }
        return {name: draft.depth * size for name, size in each.items() if size}, draft.depth
    if draft.kind == DFLASH and model.drafter:
        return {
            "DFlash drafter": 2.0 * model.drafter.parameters,
            "head, for drafts": float(weights.head),
            "DFlash KV": float(users * model.drafter.kv_bytes(context, 2.0)),
        }, 1
    return {}, 0
