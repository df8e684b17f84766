"""What a plan is good for, judged by how long an answer takes: the time until a 256-token answer is complete, with the
others' prompts in the way."""

from dataclasses import dataclass

from stoker.plan.acceptance import acceptance
from stoker.plan.catalog import Box
from stoker.plan.memory import Ask
from stoker.plan.models import Model
from stoker.plan.speed import first_token_s, predict
from stoker.sizes.memory import KV_ITEM
from stoker.sizes.weights import WeightBytes

ANSWER = 256  # tokens
GOOD_S, BEARABLE_S, STALL_S = 20.0, 60.0, 2.0
GOOD, DEGRADED, UNSUITABLE = "good", "degraded", "not suitable"


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
