"""The speed of a plan: the roofline (speed.py), other users' prompts, and the correction by rows like it."""

from dataclasses import dataclass, replace
from functools import cached_property

from stoker.plan.acceptance import Acceptance, acceptance
from stoker.plan.cases import ANSWER
from stoker.plan.catalog import Box, find_scheme, names_of_rows
from stoker.plan.correction import Correction, Corrector, Known, guess_of, known_of, nearest
from stoker.plan.evidence import Row, of_models
from stoker.plan.likeness import Setting, setting
from stoker.plan.models import Model
from stoker.plan.speed import AS, Speed, predict, prompt_seconds, spread_of, unseen
from stoker.plan.vllm_pool import block_tokens
from stoker.sizes.memory import KV_ITEM
from stoker.sizes.step import MTP_DRAFT, Draft
from stoker.sizes.weights import WeightBytes

TURN = 2048  # tokens of a prompt that are new, where several users' prompts are mostly cached


@dataclass(frozen=True)
class Forecaster:
    """Everything of a plan but drafter, text, context and users."""

    model: Model
    weights: WeightBytes
    key: str  # of the weights
    box: Box
    engine: str
    kv: str = "bf16"

    def with_weights(self, key: str) -> "Forecaster":
        return replace(self, key=key, weights=WeightBytes.of(self.model, find_scheme(key)))

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Measured rows of the model, or of one of the same shape."""
        return of_models(names_of_rows(self.model))

    @cached_property
    def _known(self) -> dict[bool, tuple[Known, ...]]:
        """By whether acceptance is assumed; each where it is asked for."""
        return {}

    @cached_property
    def _correctors(self) -> dict[tuple[str, int, bool], Corrector]:
        return {}

    def known(self, blind: bool) -> tuple[Known, ...]:
        """The rows that can be predicted, told their acceptance or not."""
        if blind not in self._known:
            self._known[blind] = known_of(self.rows, blind=blind)
        return self._known[blind]

    def nearest(self, draft: Draft, kind: str, context: int, users: int, limit: int = 5) -> tuple[Row, ...]:
        here = self.setting(draft, kind, context, users)
        return nearest(self.rows, self.known(draft.drafting), here, limit)

    def corrector(self, here: Setting) -> Corrector:
        """Rows near one setting are near others of the drafter and as many users."""
        blind = here.guess > 0
        key = (here.drafter, here.users, blind)
        if key not in self._correctors:
            self._correctors[key] = Corrector(here, self.known(blind))
        return self._correctors[key]

    def setting(self, draft: Draft, kind: str, context: int, users: int, guess: float = 0.0) -> Setting:
        return setting(
            self.model, self.key, self.box.of_rows, self.engine, "", draft, kind, context, users, self.kv, guess
        )

    def decode(self, draft: Draft, kind: str, accepted: float, context: int, users: int) -> Speed:
        """By the arithmetic alone, and of decoding alone."""
        return predict(self.model, self.weights, self.box, draft, accepted=accepted, kind=kind, context=context,
                       users=users, kv_item=KV_ITEM[self.kv], engine=self.engine)  # fmt: skip

    def speed(
        self, draft: Draft, kind: str, *, context: int, users: int = 1, accepted: Acceptance | None = None,
        fresh: int | None = None,
    ) -> Speed:  # fmt: skip
        """`fresh`: tokens of each prompt that are computed anew while others decode; None: a turn's worth."""
        return self.told(draft, kind, context=context, users=users, accepted=accepted, fresh=fresh)[0]

    def told(
        self, draft: Draft, kind: str, *, context: int, users: int = 1, accepted: Acceptance | None = None,
        fresh: int | None = None,
    ) -> tuple[Speed, Correction]:  # fmt: skip
        """The speed, and how it was corrected."""
        accepted = accepted or acceptance(draft, kind, model=self.model.name)
        speed = self.decode(draft, kind, accepted.tokens_per_step, context, users)
        if users > 1:
            speed = self._with_prompts(
                speed, context, self.turn(draft, context) if fresh is None else min(fresh, context)
            )
        guess = guess_of(draft.kind, self.model.name) if accepted.assumed and not accepted.asked else 0.0
        here = self.setting(draft, kind, context, users, guess)
        found = self.corrector(here).correct(
            here, speed.uncorrected, spread_of(AS.get(self.engine, self.engine)), unseen(self.box), fresh is None
        )
        return replace(speed, factor=found.factor, low_factor=found.low, high_factor=found.high), found

    def turn(self, draft: Draft, context: int) -> int:
        """Tokens of a prompt that the engine computes where all but a turn of it was served before: vLLM reuses whole
        blocks of a hybrid's cache, and with MTP not the last of them."""
        beside = 0.0
        if self.model.delta and AS.get(self.engine, self.engine) == "vLLM" and self.engine != "stoker":
            mtp = draft.kind == MTP_DRAFT
            block = block_tokens(self.model, draft.depth if draft.drafting else 0, KV_ITEM[self.kv])
            beside = block * (1.5 if mtp else 0.5)
        return min(context, TURN + int(beside))

    def _with_prompts(self, speed: Speed, context: int, fresh: int) -> Speed:
        seconds = prompt_seconds(self.model, self.weights, self.box, speed.users * fresh, seen=context - fresh / 2,
                                 engine=self.engine)  # fmt: skip
        return replace(speed, prompts_s=seconds, answer=ANSWER)
