"""How many drafts to verify, decided anew each step. No torch; microseconds per request.

A step that verifies n drafts emits one token per request and as many more as are accepted. What it costs grows with
tokens and with the distinct experts they touch. Over many steps the most tokens per second come out if a draft is
verified exactly when

    probability that it and all before it are right  >  (tokens per second lately) * (seconds it adds to the step)

since seconds not spent on it earn the usual rate. Drafting is decided by the same rule, from what drafting earned
lately. Probabilities are the drafter's confidences through `Calibration`, shifted by how this request's drafts have
fared; seconds are a `LinearFit` in tokens and distinct experts (`ExpertPool`). Free drafts are verified a few deep
until their request has shown that more are right. A request whose drafts do not pay for themselves is left alone, but
for a probe now and then: it is drafted for and nothing is verified, since the text that comes shows by itself whether
the draft was right. Any rule is exact here: which token is emitted never depends on what was drafted.

Wiring, once per decode step of an engine (all lists in the order of the requests of the step):

    paid   = controller.ask(keys, limits)           # keys: request ids; limits: most drafts each could still use
    drafts = drafter.propose(                       # DraftRequest(..., depth=limit, free_only=not paid[i])
                 requests, controller.more)         # MTP asks `more` after every pass
    depths = controller.cut(drafts)                 # verify drafts[i].first(depths[i])
    ... forward, choose, accept ...
    controller.observe(emitted, verify_s, draft_s, distinct)
    controller.forget(key)                          # when a request ends

`emitted` are the tokens each request put out this step (accepted drafts and the model's own). `draft_s` is the wall
time of `propose`; `verify_s` that of the rest of the decode step, forward, sampling, observing and bookkeeping, but not
the prefill beside it. On an accelerator both end at a host read that the step does anyway. `distinct` is the number of
distinct experts the step's tokens were routed to, averaged over the MoE layers; None where it is not counted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from stoker.speculate.depth.calibration import Calibration
from stoker.speculate.depth.cost import DraftCost, ExpertPool, LinearFit, StepBytes
from stoker.speculate.drafter import Draft

HOPELESS = 0.01  # drafts less likely than this to be reached and right are not looked at
PROBE_SHARE = 0.008  # of the time may go to finding out whether drafting would pay again
PROBE_TRUST = 0.5  # share of the earnings that drafting was given up for that a probe is hoped to bring
RIDE_AFTER = 8  # steps after which a request that sleeps joins a pass that others pay for
RATE_MEMORY = 0.97  # per step: tokens and seconds of about the last 30 steps make the going rate
RATE_START = 4.0  # steps without drafts that a request's rate starts from
EARNING = 0.03  # weight of the newest draft in what drafting earns a request
FIRST_BLOCKS = 2  # blocks the first guess at that is worth
DOUBT = 1.5  # times the price of drafting that a new request is taken to earn by it
SHIFT_KNOWN = 4.0  # information that a request's drafts fare as those of others do
SHIFT_MEMORY, SHIFT_LIMIT = 0.98, 6.0  # per block; most log odds a request may differ by
FIRST_REACH, LEAST_REACH = 3, 2  # free drafts of a source to verify in a request's first block, and after a wrong one
FURTHER = 3  # times as many as were right in the last block may be verified in the next
NEXT = 0.1  # weight of the newest token in how likely the next draft usually is
_first = itemgetter(0)


@dataclass(slots=True)
class _Shift:
    """By how many log odds one request's drafts fare better or worse than drafts of their confidence do."""

    known: float = 0.0  # information that its drafts have given lately
    value: float = 0.0

    def learn(self, surprise: float, information: float) -> None:
        """From one block: hits less what was expected of them, and the variance of that."""
        self.known = SHIFT_MEMORY * self.known + information
        value = self.value + surprise / (self.known + SHIFT_KNOWN)
        self.value = min(max(value, -SHIFT_LIMIT), SHIFT_LIMIT)


@dataclass(slots=True)
class _Track:
    """What is remembered of one request."""

    earns: float  # tokens a block of paid drafts lately brought, less what verifying it cost
    pool: ExpertPool  # experts its text draws from, as seen in steps it had to itself
    tokens: float = 0.0  # emitted lately ...
    seconds: float = 0.0  # ... in this time
    shifts: dict[str, _Shift] = field(default_factory=dict)  # by source
    reach: dict[str, int] = field(default_factory=dict)  # free drafts to verify at most, by source
    brings: float = 0.0  # paid drafts of a block that were lately right
    blocks: int = 0  # of paid drafts that `earns` rests on
    next_right: float = 0.7
    idle: int = 0  # steps since it was last drafted for at a price
    shadow: Draft | None = None  # the last draft, as long as the text has followed it
    chances: Sequence[float] = ()  # of its tokens to be right, as far as they were looked at
    followed: int = 0  # tokens of it that came true


@dataclass(slots=True)
class _Step:
    """One step between `ask` and `observe`."""

    keys: list[int]
    tracks: list[_Track]
    limits: list[int]
    paid: list[bool]  # drafted for at a price
    looks: list[bool]  # only to see whether that would pay again: a probe verifies nothing
    rate: float
    drafts: Sequence[Draft] = ()
    depths: Sequence[int] = ()  # verified
    wanted: Sequence[int] = ()  # that would be worth verifying: the same, but in a probe
    expected: Sequence[float] = ()  # of the wanted ones to be accepted, per request
    predicted_s: float = 0.0
    looked: list[int] = field(default_factory=list)  # per request: drafts that `more` has looked at ...
    reached: list[float] = field(default_factory=list)  # ... the probability that all of them are right ...
    newest: list[float] = field(default_factory=list)  # ... and that of the last

    def __post_init__(self) -> None:
        count = len(self.keys)
        self.looked, self.reached, self.newest = [0] * count, [1.0] * count, [1.0] * count


class DepthController:
    """`costs` names the drafters that cost something to ask; drafts of other sources (lookup, forced) are free."""

    def __init__(self, step: StepBytes, costs: Mapping[str, DraftCost], budget: int = 128) -> None:
        self._shape, self._costs, self._budget = step, dict(costs), budget
        self._verify = LinearFit([step.fixed, step.token, step.expert])
        block, token = (sum(getattr(cost, name) for cost in costs.values()) for name in ("block", "token"))
        self._drafting = LinearFit([block, token])
        self._shared = ExpertPool(step.experts, step.top_k)  # of whatever runs together
        self._pool = self._shared  # that of the current step
        self._calibration: dict[str, Calibration] = {}
        self._tracks: dict[int, _Track] = {}
        self._step: _Step | None = None
        self._tally = Tally()

    # -- the four calls of a step

    def ask(self, keys: Sequence[int], limits: Sequence[int]) -> list[bool]:
        """Which requests to draft for at a price this step. Free drafters are asked in any case."""
        for unreported in self._step.tracks if self._step else ():
            unreported.shadow = None  # nobody told what came after its last draft: it cannot be followed any further
        self._pool = self._shared
        rate, tracks = 0.0, []
        for key in keys:
            track = self._tracks.get(key)
            if track is None:
                # a new request gets the benefit of the doubt: a few blocks to show what drafting earns it
                entry = self._drafting.seconds((1.0, 1.0)) / max(self._verify_seconds(len(keys)), 1e-12)
                track = self._tracks[key] = _Track(DOUBT * entry, self._shared.copy())
            tracks.append(track)
            rate += self._rate(track, len(keys))
        if len(tracks) == 1:
            self._pool = tracks[0].pool
        nobody = [False] * len(keys)
        step = _Step(list(keys), tracks, list(limits), nobody, nobody, rate)
        self._step = step
        if not self._costs:
            return step.paid
        able = [limit > 0 for limit in limits]
        entry = rate * self._drafting.seconds((1.0, 1.0))
        earned = sum(t.earns for t, can in zip(tracks, able, strict=True) if can and t.earns > 0.0)
        if earned > entry:
            step.looks = [
                can and t.earns <= HOPELESS and t.idle >= RIDE_AFTER for t, can in zip(tracks, able, strict=True)
            ]
            step.paid = [
                can and (t.earns > HOPELESS or look) for t, can, look in zip(tracks, able, step.looks, strict=True)
            ]
        else:
            # a probe loses what drafting costs beyond what it seems to earn, of which there are doubts
            idle = max((t.idle for t, can in zip(tracks, able, strict=True) if can), default=0)
            if idle * PROBE_SHARE * rate * self._verify_seconds(len(keys)) >= entry - PROBE_TRUST * earned:
                step.paid = step.looks = able
        for track, paid in zip(tracks, step.paid, strict=True):
            track.idle = 0 if paid else track.idle + 1
        return list(step.paid)

    def rivals(self) -> list[float]:
        """Per request of the step: right drafts that a free guess has to promise, so that it is taken unseen. As many
        as its paid drafts lately brought, less those that could be had in the time of a draft."""
        step = self._current()
        price = step.rate * self._drafting.seconds((1.0, 1.0)) if self._costs else 0.0
        return [
            max(0.0, track.brings - price) if paid and not look else 0.0
            for track, paid, look in zip(step.tracks, step.paid, step.looks, strict=True)
        ]

    def more(self, drafts: Sequence[Draft]) -> list[bool]:
        """For drafters that make one token per pass: which requests are worth one more?"""
        step = self._current()
        planned = len(drafts) + sum(map(len, drafts))
        token_s = self._verify_seconds(planned + 1) - self._verify_seconds(planned)
        gains = []
        for i, (draft, limit) in enumerate(zip(drafts, step.limits, strict=True)):
            gain = 0.0
            if draft.source in self._costs and 0 < len(draft) < limit:
                for chance in self._chances(step.tracks[i], draft, start=step.looked[i]):
                    step.reached[i] *= chance
                    step.newest[i] = chance
                step.looked[i] = len(draft)
                usual = step.tracks[i].next_right
                gain = step.reached[i] * 0.5 * (usual + step.newest[i]) - step.rate * token_s
            gains.append(gain)
        passes = self._drafting.seconds((0.0, 1.0))
        worth = sum(gain for gain in gains if gain > 0.0) > step.rate * passes
        return [worth and gain > 0.0 for gain in gains]

    def cut(self, drafts: Sequence[Draft]) -> list[int]:
        """How many drafts of each request to verify."""
        step = self._current()
        reached: list[tuple[float, int]] = []
        for i, (track, draft, limit) in enumerate(zip(step.tracks, drafts, step.limits, strict=True)):
            if not len(draft):
                continue
            track.shadow, track.followed, track.chances = draft, 0, self._chances(track, draft)
            right = 1.0
            most = limit if draft.source in self._costs else min(limit, track.reach.get(draft.source, FIRST_REACH))
            for chance in track.chances[:most]:
                right *= chance
                reached.append((right, i))
        # chances only fall within a block, so the n likeliest are the first few of every block: no better n exist
        reached.sort(key=_first, reverse=True)
        count = len(drafts)
        best, value, now = 0, 0.0, 0.0
        costs = self._further_seconds(count)
        for n, (right, _) in enumerate(reached[: max(0, self._budget - count)], start=1):
            now += right - step.rate * next(costs)
            if now > value:
                best, value = n, now
        depths, expected = [0] * count, [0.0] * count
        for right, i in reached[:best]:
            depths[i] += 1
            expected[i] += right
        step.drafts, step.wanted, step.expected = drafts, depths, expected
        # whether the first draft of a probe is right shows without verifying it
        step.depths = [
            0 if look and draft.source in self._costs else depth
            for depth, draft, look in zip(depths, drafts, step.looks, strict=True)
        ]
        step.predicted_s = self._verify_seconds(count + sum(step.depths))
        return list(step.depths)

    def observe(
        self, emitted: Sequence[Sequence[int]], verify_s: float, draft_s: float, distinct: float | None = None
    ) -> None:
        """What came of the step."""
        step, self._step = self._current(), None
        count, verified = len(step.keys), sum(step.depths)
        self._tally.add_step(step.predicted_s, verify_s, draft_s, any(step.paid), any(step.looks))
        for depth, tokens in zip(step.depths, emitted, strict=True):
            self._tally.add_block(depth, len(tokens))
        touched = self._pool.distinct(count + verified)
        if distinct is not None:
            self._tally.add_experts(touched, distinct)
            self._shared.add(count + verified, distinct)
            if self._pool is not self._shared:
                self._pool.add(count + verified, distinct)
            touched = distinct
        wanted = sum(step.wanted)
        added_s = self._verify_seconds(count + wanted) - self._verify_seconds(count) if self._costs else 0.0
        self._verify.add((1.0, count + verified, touched), verify_s)
        for track, draft, depth, tokens in zip(step.tracks, step.drafts, step.depths, emitted, strict=True):
            self._follow(track, tokens)
            if depth and draft.source not in self._costs:
                # how far a match goes on differs between texts more than its confidence tells: no text pays for others
                track.reach[draft.source] = max(LEAST_REACH, FURTHER * min(depth, len(tokens) - 1))
            track.tokens = track.tokens * RATE_MEMORY + len(tokens)
            track.seconds = track.seconds * RATE_MEMORY + verify_s + draft_s
        if self._costs:
            self._observe_drafting(step, emitted, draft_s, added_s / max(1, wanted))

    def forget(self, key: int) -> None:
        """The request has ended."""
        self._tracks.pop(key, None)

    # -- what is known

    def stats(self) -> dict[str, Any]:
        """Plain numbers for whoever reports: see the keys."""
        fixed, token, expert = self._verify.coefficients
        block, again = self._drafting.coefficients
        return self._tally.report() | {
            "seconds": {
                "step": fixed,
                "per_token": token,
                "per_expert": expert,
                "per_drafted_block": block,
                "per_draft_pass": again,
            },
            "expert_pool": self._shared.pool if self._shape.experts else None,
            "calibration": {source: known.table() for source, known in self._calibration.items()},
        }

    def _current(self) -> _Step:
        if self._step is None:
            raise RuntimeError("the depth controller was not asked before this step; call ask() first")
        return self._step

    def _rate(self, track: _Track, count: int) -> float:
        """Tokens per second of a request lately, one of `count`; at its start, those of a step without drafts."""
        start_s = self._verify_seconds(count)
        return (track.tokens + RATE_START) / max(track.seconds + RATE_START * start_s, 1e-12)

    def _verify_seconds(self, tokens: int) -> float:
        fixed, token, expert = self._verify.coefficients
        return fixed + token * tokens + expert * self._pool.distinct(tokens)

    def _further_seconds(self, tokens: int) -> Iterator[float]:
        """What each further token adds to a step of that many."""
        _, token, expert = self._verify.coefficients
        fresh, left = self._pool.next_of(tokens)
        while True:
            yield token + expert * fresh
            fresh *= left

    def _chances(self, track: _Track, draft: Draft, start: int = 0) -> list[float]:
        """Probability of each draft to be right if those before it are; ends where none is left to look at."""
        known = self._calibration.get(draft.source)
        if known is None:
            known = self._calibration[draft.source] = Calibration()
        shift = track.shifts[draft.source].value if draft.source in track.shifts else 0.0
        return known.chances(draft.confidence, shift, start, HOPELESS)

    def _follow(self, track: _Track, emitted: Sequence[int]) -> None:
        """Compares the text with the last draft, its unverified part too: every comparison teaches, and is free."""
        draft = track.shadow
        if draft is None:
            return
        known = self._calibration[draft.source]
        shift = track.shifts.setdefault(draft.source, _Shift())
        start, stop = track.followed, min(track.followed + len(emitted), len(draft))
        chances = track.chances[start:stop]
        if start + len(chances) < stop:  # the text has followed it further than it seemed worth looking
            chances = known.chances(draft.confidence[:stop], shift.value, start)
        if stop - start < len(emitted):
            track.shadow = None  # the draft ends here
        surprise = information = 0.0
        for chance, token in zip(chances, emitted, strict=False):
            place = track.followed
            hit = draft.tokens[place] == token
            known.add(place, draft.confidence[place], hit)
            surprise += hit - chance
            information += chance * (1.0 - chance)
            track.next_right += NEXT * (hit - track.next_right)
            if not hit:
                track.shadow = None
                break
            track.followed += 1
        shift.learn(surprise, information)

    def _right(self, step: _Step, i: int, emitted: Sequence[int]) -> float:
        """Drafts a block got right, half as expected and half as it came; of a probe only the first has been seen.
        Of a draft that a grammar refused nothing is left, and nothing is expected."""
        if step.looks[i]:
            return step.expected[i] if list(emitted[:1]) == list(step.drafts[i].tokens[:1]) else 0.0
        return 0.5 * (step.expected[i] + min(step.depths[i], len(emitted) - 1))

    def _observe_drafting(self, step: _Step, emitted: Sequence[Sequence[int]], draft_s: float, verify_s: float) -> None:
        """What asking a drafter cost and brought. `verify_s`: what verifying a draft added to the step."""
        lengths = [len(draft) if draft.source in self._costs else 0 for draft in step.drafts]
        passes = float(max(lengths, default=0))
        if passes:
            self._drafting.add((1.0, passes), draft_s, self._verify.scale)
        elif not self._drafting.measured:
            self._drafting.guess(self._verify.scale)
        further_s = self._drafting.seconds((0.0, max(0.0, passes - 1.0))) / max(1, sum(lengths))
        for i, (track, draft) in enumerate(zip(step.tracks, step.drafts, strict=True)):
            if draft.source in self._costs:
                seconds = verify_s * step.wanted[i] + further_s * lengths[i]
                right = self._right(step, i, emitted[i])
                self._earn(track, right, right - step.rate * seconds, step.looks[i])

    def _earn(self, track: _Track, right: float, earned: float, probing: bool) -> None:
        """A probe that would have paid wakes the request at once; bad news is believed little by little."""
        track.blocks += 1
        weight = max(EARNING, 1.0 / (track.blocks + FIRST_BLOCKS))
        track.brings += weight * (right - track.brings)
        track.earns = earned if probing and earned > track.earns else track.earns + weight * (earned - track.earns)


class Tally:
    """What was chosen, predicted and measured, counted for whoever reports it."""

    def __init__(self) -> None:
        self._steps = self._drafted_for = self._probes = 0
        self._verified = self._accepted = 0
        self._depths: list[int] = []  # how often each depth was chosen, over requests
        self._predicted_s = self._measured_s = self._off_s = self._draft_s = 0.0
        self._predicted_experts = self._measured_experts = 0.0
        self._counted = 0  # steps whose experts were counted

    def add_step(self, predicted_s: float, measured_s: float, draft_s: float, drafted_for: bool, probe: bool) -> None:
        self._steps += 1
        self._drafted_for += drafted_for
        self._probes += probe
        self._draft_s += draft_s
        if self._steps > 1:  # a prediction before anything was measured is none
            self._predicted_s += predicted_s
            self._measured_s += measured_s
            self._off_s += abs(predicted_s - measured_s)

    def add_block(self, depth: int, emitted: int) -> None:
        """One request of a step: drafts verified, tokens that came out."""
        self._depths += [0] * (depth + 1 - len(self._depths))
        self._depths[depth] += 1
        self._verified += depth
        self._accepted += min(depth, max(0, emitted - 1))

    def add_experts(self, predicted: float, measured: float) -> None:
        self._counted += 1
        self._predicted_experts += predicted
        self._measured_experts += measured

    def report(self) -> dict[str, Any]:
        """Seconds and experts are means per step; `mean_error` is relative."""
        steps, timed, counted = max(1, self._steps), max(1, self._steps - 1), max(1, self._counted)
        experts = {"predicted": self._predicted_experts / counted, "measured": self._measured_experts / counted}
        return {
            "steps": self._steps,
            "steps_drafted_for": self._drafted_for,
            "probes": self._probes,
            "depths": list(self._depths),
            "verified_drafts": self._verified,
            "accepted_drafts": self._accepted,
            "step_s": {
                "predicted": self._predicted_s / timed,
                "measured": self._measured_s / timed,
                "mean_error": self._off_s / self._measured_s if self._measured_s else 0.0,
                "drafting": self._draft_s / steps,
            },
            "distinct_experts": experts if self._counted else None,
        }
