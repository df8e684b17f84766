"""Which drafter a plan takes where none is asked for: the fastest that the engine supports with this model."""

from dataclasses import dataclass

from stoker.plan.acceptance import acceptance
from stoker.plan.forecast import Forecaster
from stoker.plan.models import Model
from stoker.plan.speed import Speed
from stoker.sizes.step import DFLASH, MTP_DRAFT, Draft

# what is compared, where the model has such a drafter
COMPARED = (Draft(), Draft("mtp", 1), Draft("mtp", 2), Draft("mtp", 4), Draft("dflash", 4), Draft("dflash", 12))
SUPPORT = {
    "stoker": (MTP_DRAFT, DFLASH),
    "vLLM": (MTP_DRAFT, DFLASH),
    "SGLang": (MTP_DRAFT, DFLASH),
    "llama.cpp": (MTP_DRAFT,),
}
TIE = 0.02  # a deeper or another drafter must gain more than this

Line = tuple[Draft, Speed, Speed]  # a draft, on general and on agent text


@dataclass(frozen=True)
class Choice:
    draft: Draft
    because: str
    asked: bool


def choose(
    cast: Forecaster, asked: Draft | None, kind: str, context: int, users: int, fresh: int | None
) -> tuple[Choice, list[Line]]:
    """The drafter, and the lines of the table that it was chosen from."""
    drafts = [draft for draft in COMPARED if has(cast.model, draft)]

    def speed(draft: Draft, text: str) -> Speed:
        return cast.speed(draft, text, context=context, users=users, fresh=fresh)

    lines = [(draft, speed(draft, "mixed"), speed(draft, "agent")) for draft in drafts]
    supported = [draft for draft in drafts if not draft.drafting or draft.kind in SUPPORT.get(cast.engine, ())]
    found = {draft: speed(draft, kind) for draft in supported}
    best = supported[0]
    for draft in supported[1:]:
        if sure(draft, found[draft], kind, cast.model) > (1 + TIE) * sure(best, found[best], kind, cast.model):
            best = draft
    if asked is None:
        return Choice(best, _because(best, found, cast, kind), False), lines
    faster = best != asked and asked in found and found[best].tokens_per_s > (1 + TIE) * found[asked].tokens_per_s
    beside = f"; {best} is {_because(best, found, cast, kind)}" if faster else ""
    return Choice(asked, f"as asked for{beside}", True), lines


def has(model: Model, draft: Draft) -> bool:
    if draft.kind == DFLASH:
        return model.drafter is not None and draft.depth < model.drafter.block_size
    return not draft.drafting or (draft.kind == MTP_DRAFT and model.mtp_layers > 0)


def sure(draft: Draft, speed: Speed, kind: str, model: Model) -> float:
    """What a drafter is compared by: its speed, or where its acceptance is another model's, the low end of its
    range."""
    other = draft.drafting and "measured on" in acceptance(draft, kind, model=model.name).said_by
    return speed.low if other else speed.tokens_per_s


def _because(best: Draft, found: dict[Draft, Speed], cast: Forecaster, kind: str) -> str:
    if len(found) == 1:
        why = (
            "the model has none" if not cast.model.mtp_layers and not cast.model.drafter else f"{cast.engine} runs none"
        )
        return f"no drafts: {why} that the planner knows"
    by_kind: dict[str, Draft] = {}
    for draft in found:
        held = by_kind.get(draft.kind)
        if draft.kind != best.kind and (held is None or found[draft].tokens_per_s > found[held].tokens_per_s):
            by_kind[draft.kind] = draft
    against = " and ".join(f"{found[d].tokens_per_s:.0f} with {d}" for d in by_kind.values())
    text = "general" if kind == "mixed" else kind
    return f"the fastest that {cast.engine} supports: ≈ {found[best].tokens_per_s:.0f} against {against} ({text} text)"
