"""A measured row with everything that is needed to predict it: the model's shapes, its weights, box and drafter."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from stoker.plan.acceptance import acceptance
from stoker.plan.catalog import Box, boxes, model_of_row, scheme_of
from stoker.plan.evidence import AGENT, COUNTING, Row
from stoker.plan.families import sized
from stoker.plan.models import Model
from stoker.plan.speed import Fit, Speed, predict, prompt_seconds, with_prompts
from stoker.sizes.step import DFLASH, MTP_DRAFT, Draft
from stoker.sizes.weights import WeightBytes

SHORT_PROMPT = 30  # tokens, where a row does not say
SHORT_CONTEXT = 512
ANSWER = 256  # tokens, where a row does not say
USUAL_DEPTH = {MTP_DRAFT: 2, DFLASH: 12}  # where a row does not say


@dataclass(frozen=True)
class Case:
    row: Row
    model: Model
    weights: WeightBytes
    box: Box
    draft: Draft
    accepted: float
    assumed: bool = False  # the acceptance, or the depth

    def decode(self, fit: Fit) -> Speed:
        row = self.row
        return predict(
            self.model, self.weights, self.box, self.draft, accepted=self.accepted, kind=row.kind,
            context=row.context_tokens or SHORT_CONTEXT, users=row.users, kv_item=1.0 if row.kv == "fp8" else 2.0,
            engine=row.engine, backend=row.backend, fit=fit,
        )  # fmt: skip

    def predict(self, fit: Fit) -> float:
        """Tokens per second as the row measures them."""
        row, decode = self.row, self.decode(fit)
        if row.users > 1:
            return decode.per_user if row.scope == "per_stream" else self._together(decode, fit)
        if row.timing != "end-to-end" or not row.output_tokens:
            return decode.per_user
        first = predict(  # the prompt, as one step of that many tokens
            self.model, self.weights, self.box, Draft("lookup", SHORT_PROMPT - 1), kind=row.kind,
            context=SHORT_PROMPT, engine=row.engine, backend=row.backend, fit=fit,
        ).step_s  # fmt: skip
        return row.output_tokens / (first + row.output_tokens / decode.per_user)

    def _together(self, decode: Speed, fit: Fit) -> float:
        """Of all users: the others' prompts are computed while one decodes; end to end, one's own counts too."""
        row = self.row
        prompt = row.context_tokens or SHORT_PROMPT
        fresh = row.fresh_tokens or prompt
        prompts = row.users if row.timing == "end-to-end" else row.users - 1
        seconds = prompt_seconds(
            self.model, self.weights, self.box, prompts * fresh, seen=prompt - fresh / 2, engine=row.engine, fit=fit
        )
        return with_prompts(decode, seconds, row.output_tokens or ANSWER).uncorrected


_WEIGHED: dict[tuple[str, str], WeightBytes] = {}


def weighed(model: Model, key: str) -> WeightBytes:
    """Of a row's model, kept by its name: hashing all its weights would take longer than weighing them."""
    found = _WEIGHED.get((model.name, key))
    if found is None:
        found = _WEIGHED[model.name, key] = WeightBytes.of(model, scheme_of(key))
    return found


def why_not(row: Row) -> str:
    """Why a row cannot be predicted; empty if it can."""
    if row.decode_tok_s is None:
        return "no decode speed"
    if row.drafter not in ("none", MTP_DRAFT, DFLASH):
        return "a drafter the planner does not know"
    if not row.weights or box_of(row) is None:
        return "weights not stated, or not of a kind the planner counts"
    model = model_of_row(row.model)
    if model is None and not (row.active_b and row.drafter == "none"):
        return "neither shape nor size of the model known"
    if model is not None and not _has(model, row.drafter):
        return "a drafter of which nothing is known"
    return ""


def _has(model: Model, drafter: str) -> bool:
    known = {"none": True, MTP_DRAFT: model.mtp_layers > 0, DFLASH: bool(model.drafter)}
    return known[drafter]


def cases_of(rows: Iterable[Row], blind: bool = False) -> list[Case]:
    """The rows among these that can be predicted. `blind` as in `case_of`."""
    return [case_of(row, blind) for row in rows if not why_not(row)]


def case_of(row: Row, blind: bool = False) -> Case:
    """Of a model whose shape is known, or else one that is known by its size alone. `blind` is a prediction from what a
    planner is told: the acceptance is assumed, whatever the row states."""
    box = box_of(row)
    assert box is not None
    active = 1e9 * (row.active_b or 0.0)
    model = model_of_row(row.model) or sized(row.model, active, 1e9 * row.parameters_b if row.parameters_b else active)
    depth = row.depth if row.depth is not None else USUAL_DEPTH[row.drafter]
    draft = Draft(row.drafter, depth)
    assumed = row.tokens_per_step is None or row.depth is None or (blind and draft.drafting)
    accepted = row.tokens_per_step
    if accepted is None or assumed:
        accepted = acceptance(draft, row.kind if row.kind != COUNTING else AGENT).tokens_per_step
    return Case(row, model, weighed(model, row.weights), box, draft, min(accepted, float(draft.verified)), assumed)


def box_of(row: Row) -> Box | None:
    """The box of a row. Several boxes are one with as many devices; a pair of cards has its own entry."""
    return _box(row.box, row.boxes)


@cache
def _box(key: str, count: int) -> Box | None:
    box = next((b for b in boxes() if b.key == key), None)
    if key == "r9700":
        pair = next(b for b in boxes() if b.key == "dual-r9700")
        return replace(pair, devices=count)
    return replace(box, devices=box.devices * count) if box and count > 1 else box
