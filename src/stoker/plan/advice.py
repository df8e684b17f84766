"""What a practitioner would say about a plan: advice, and which uses the plan is good for.

Every sentence of advice stands on a measured row or on the arithmetic. A use is judged by the time until an answer of
256 tokens is complete, while the other users' prompts are computed too.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from stoker.plan.acceptance import MEASURED_WITH, acceptance
from stoker.plan.cases import SHORT_CONTEXT
from stoker.plan.catalog import GIB, Box
from stoker.plan.forecast import Forecaster
from stoker.plan.memory import SWAPS_ABOVE, Ask, Budget
from stoker.plan.models import Model
from stoker.plan.speed import Speed, first_token_s, predict
from stoker.sizes.memory import KV_ITEM
from stoker.sizes.step import DFLASH, MTP_DRAFT, Draft
from stoker.sizes.weights import WeightBytes
from stoker.weights.names import DELTANET, HEAD, SHARED

LONG_CONTEXT = 64_000
DEPTHS = {MTP_DRAFT: range(1, 9), DFLASH: range(1, 16)}
TIE = 0.01  # a deeper draft must gain more than this
ANSWER = 256  # tokens
GOOD_S, BEARABLE_S, STALL_S = 20.0, 60.0, 2.0
GOOD, DEGRADED, UNSUITABLE = "good", "degraded", "not suitable"


@dataclass(frozen=True)
class Advice:
    text: str
    because: str  # rows, or the arithmetic
    urgent: bool = False  # to be said before the plan is tried


def advise(cast: Forecaster, ask: Ask, budget: Budget, utilization: float | None) -> tuple[Advice, ...]:
    found = [
        *_misfit(cast.model, budget),
        *_utilization(cast.box, budget, ask, utilization),
        *_nvfp4(cast, ask),
        *_depth(cast, ask),
        *_lighter(cast, ask),
        *_long_contexts(cast.model, cast.weights, cast.box, ask),
        *_kv(cast.model, ask),
        *_links(cast.model, cast.box),
    ]
    return tuple(found)


def _misfit(model: Model, budget: Budget) -> Iterator[Advice]:
    if budget.fits:
        return
    largest = max(budget.items, key=lambda item: item.bytes)
    yield Advice(
        f"The largest item is {largest.name} with {largest.bytes / GIB:.1f} GiB. "
        + (f"With the users asked for, {budget.max_context:,} tokens of context fit." if budget.max_context
           else "No context is short enough: take lighter weights, a smaller model or a larger box."),
        f"{budget.total:,} bytes planned, {budget.capacity:,} there",
    )  # fmt: skip


def _utilization(box: Box, budget: Budget, ask: Ask, asked: float | None) -> Iterator[Advice]:
    if not box.unified or ask.engine != "vLLM" or not budget.flags:
        return
    share = asked or float(budget.flags[0].split()[-1])
    left = box.visible_gib * (1 - share)
    if share > SWAPS_ABOVE:
        yield Advice(
            f"A utilisation of {share:.2f} leaves {left:.1f} GiB to everything else on the box; above {SWAPS_ABOVE} "
            "boxes were seen to swap or freeze while graphs are captured. Close what you can, or lower it.",
            f"{box.visible_gib} GiB x (1 - {share:.2f}); document 001 ran at 0.90 beside nothing else",
            urgent=True,
        )


def _nvfp4(cast: Forecaster, ask: Ask) -> Iterator[Advice]:
    model, weights = cast.model, cast.weights
    if not cast.key.startswith("nvfp4") or not model.delta or not model.experts:
        return
    light = cast.with_weights("int4")
    other = light.weights
    here, there = (each.speed(Draft(), "mixed", context=SHORT_CONTEXT) for each in (cast, light))
    wide = [
        g for g in (DELTANET, HEAD, SHARED) if weights.formats.get(g) == "bf16" and other.groups[g] < weights.groups[g]
    ]
    if here.reads.total <= there.reads.total:
        return
    rows = "rows m042 (NVFP4, 16.6) and m022 (INT4, 28.3)" if model.name == MEASURED_WITH else "the arithmetic"
    yield Advice(
        f"NVFP4 brings no speed here: this checkpoint keeps {' and '.join(wide)} in BF16, so a step reads "
        f"{here.reads.total / 1e9:.1f} GB against {there.reads.total / 1e9:.1f} with INT4 AutoRound "
        f"(≈ {here.per_user:.0f} against {there.per_user:.0f} tok/s predicted without drafting).",
        rows,
        urgent=True,
    )


def _depth(cast: Forecaster, ask: Ask) -> Iterator[Advice]:
    kind = ask.draft.kind
    if kind not in DEPTHS:
        if cast.model.mtp_layers and not ask.draft.drafting and ask.engine != "llama.cpp":
            plain = _speed(cast, ask, Draft(), "agent")
            mtp = _speed(cast, ask, Draft("mtp", 2), "agent")
            yield Advice(
                f"The model has an MTP head: --draft mtp:2 would bring ≈ {mtp.per_user:.0f} instead of "
                f"{plain.per_user:.0f} tok/s on agent text (predicted).",
                "acceptance of row m061",
            )
        return
    best = {text: best_depth(cast, ask, kind, text) for text in ("prose", "code", "agent")}
    now = {text: _speed(cast, ask, ask.draft, text).per_user for text in best}
    parts = [f"{depth} for {text} (≈ {speed:.0f} tok/s, {now[text]:.0f} with {ask.draft.depth})"
             for text, (depth, speed) in best.items()]  # fmt: skip
    yield Advice(
        f"Best fixed depth of {kind}, predicted: {', '.join(parts)}. A fixed depth is wrong for somebody.",
        "tokens per step over step time at each depth; acceptance of rows "
        + ("m058, m059, m061" if kind == MTP_DRAFT else "m062, m063, m065"),
    )


def best_depth(cast: Forecaster, ask: Ask, kind: str, text: str) -> tuple[int, float]:
    """The shallowest depth within a per cent of the best, and its tokens per second and user. Depths are compared by
    the arithmetic, since rows of one depth must not speak for it against the others."""
    drafter = cast.model.drafter
    most = drafter.block_size - 1 if kind == DFLASH and drafter else max(DEPTHS[kind])

    def plain(depth: int) -> float:
        draft = Draft(kind, depth)
        return cast.decode(draft, text, acceptance(draft, text).tokens_per_step, ask.context, ask.users).per_user

    speeds = {k: plain(k) for k in DEPTHS[kind] if k <= most}
    top = max(speeds.values())
    depth = next(k for k, speed in speeds.items() if speed >= (1 - TIE) * top)
    return depth, _speed(cast, ask, Draft(kind, depth), text).per_user


def _lighter(cast: Forecaster, ask: Ask) -> Iterator[Advice]:
    if cast.key not in ("int4", "int4+fp8", "int4+int8head") or not cast.model.experts or not cast.model.delta:
        return
    here = _speed(cast, ask, ask.draft, "mixed")
    there = _speed(cast.with_weights("int4+fp8+int8head"), ask, ask.draft, "mixed")
    yield Advice(
        f"FP8 shared experts and an INT8 head would read {(here.reads.total - there.reads.total) / 1e9:.2f} GB less a "
        f"step: ≈ {there.per_user:.1f} instead of {here.per_user:.1f} tok/s (predicted).",
        "rows m054 (28.2) and m055 (36.0)" if cast.model.name == MEASURED_WITH else "the arithmetic",
    )


def _long_contexts(model: Model, weights: WeightBytes, box: Box, ask: Ask) -> Iterator[Advice]:
    if ask.users < 2 or ask.context < LONG_CONTEXT:
        return
    first = first_token_s(model, weights, box, ask.context, engine=ask.engine)
    because = f"prefill arithmetic: {ask.users} x {first:.0f} s"
    if model.name == MEASURED_WITH:
        because += "; rows m021 and m020: 20.6 tok/s each with two users of 108K, 6.2 with four"
    yield Advice(
        f"{ask.users} users with {ask.context:,} tokens each will collapse per-user speed: a cold prompt of that "
        f"length takes ≈ {first:.0f} s to compute, and the others wait or share while it runs.",
        because,
        urgent=True,
    )


def _kv(model: Model, ask: Ask) -> Iterator[Advice]:
    if ask.kv == "bf16" and ask.context * ask.users >= LONG_CONTEXT:
        saved = ask.users * model.kv_bytes(ask.context, 1.0)
        yield Advice(
            f"An FP8 KV cache would free {saved / GIB:.2f} GiB; at short contexts it changes no speed.",
            f"{ask.users} x {ask.context:,} tokens x {model.kv_bytes_per_token(1.0):,.0f} bytes; document 003",
        )


def _links(model: Model, box: Box) -> Iterator[Advice]:
    if box.devices > 1:
        yield Advice(
            f"{box.devices} devices read {box.devices} times as fast, but each of {model.layers} layers waits for the "
            "other side; a model that fits one device alone gains little.",
            "row m049: 235B on two boxes, 17.0 tok/s; rows m200 and m201: 16.3 on one, 23.0 on two",
        )


@dataclass(frozen=True)
class Use:
    name: str
    kind: str  # of text
    users: int
    prompt: int
    cached: float  # share of the prompt that the prefix cache has
    long_prompts: int  # users whose prompt is that long; the others' is short


USES = (
    Use("one user, chat with short prompts", "prose", 1, 30, 0.0, 1),
    Use("structured extraction (JSON), one at a time", "agent", 1, 200, 0.0, 1),
    Use("one question about 30K tokens of documents, prefix cached", "prose", 1, 30_000, 0.9, 1),
    Use("four users, chat with short prompts", "prose", 4, 30, 0.0, 4),
    Use("four users, one of them with 8K of documents", "prose", 4, 7_500, 0.0, 1),
    Use("four users with 100K contexts", "prose", 4, 100_000, 0.0, 4),
)


@dataclass(frozen=True)
class Verdict:
    use: str
    grade: str
    seconds: float  # until the answer is complete
    first_token_s: float
    per_user: float  # tokens/s while all decode
    because: str


def verdicts(model: Model, weights: WeightBytes, box: Box, ask: Ask) -> tuple[Verdict, ...]:
    return tuple(_judge(use, model, weights, box, ask) for use in USES if use.prompt < model.max_positions)


def _judge(use: Use, model: Model, weights: WeightBytes, box: Box, ask: Ask) -> Verdict:
    own = first_token_s(model, weights, box, use.prompt, cached=int(use.cached * use.prompt), engine=ask.engine)
    # every long prompt of the others is computed before or between this one's tokens
    wait = own * use.long_prompts
    tokens = acceptance(ask.draft, use.kind).tokens_per_step
    mean_context = max(30, use.prompt * use.long_prompts // use.users)
    speed = predict(model, weights, box, ask.draft, accepted=tokens, kind=use.kind, context=mean_context,
                    users=use.users, kv_item=KV_ITEM[ask.kv], engine=ask.engine)  # fmt: skip
    seconds = wait + ANSWER / speed.per_user
    stalls = use.users > 1 and own > STALL_S  # one's prompt stops the others' answers for that long
    grade = UNSUITABLE if seconds > BEARABLE_S else DEGRADED if seconds > GOOD_S or stalls else GOOD
    because = (
        f"first token after {wait:.1f} s, then {speed.per_user:.1f} tok/s each: {seconds:.0f} s for {ANSWER} tokens"
    )
    return Verdict(use.name, grade, seconds, wait, speed.per_user, because)


def _speed(cast: Forecaster, ask: Ask, draft: Draft, text: str) -> Speed:
    return cast.speed(draft, text, context=ask.context, users=ask.users)
