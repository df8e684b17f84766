"""The controller verifies what pays and nothing else, notices when that changes, and costs next to nothing."""

import random
import subprocess
import sys
from itertools import product
from statistics import mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.speculate.depth.controller import DepthController
from stoker.speculate.depth.cost import DraftCost, StepBytes
from stoker.speculate.drafter import Draft

MOE = StepBytes(fixed=5e9, expert=2.35e8, experts=256, top_k=8)
SPEED = 227e9  # bytes/s of the pretended box
MTP, DFLASH = {"mtp": DraftCost(token=9e8)}, {"dflash": DraftCost(block=1.2e9)}


class Box:
    """An engine that is nothing but a clock and texts in which a draft of confidence c is right with `truth(c)`."""

    def __init__(self, costs: dict[str, DraftCost], pool: float = 40.0, seed: int = 0, step: StepBytes = MOE) -> None:
        self.controller = DepthController(step, costs)
        self.costs, self.step_bytes, self.pool, self.rng = costs, step, pool, random.Random(seed)
        self.paid: list[bool] = []
        self.depths: list[int] = []
        self.seconds = self.tokens = 0.0

    def verify_s(self, tokens: int) -> tuple[float, float]:
        distinct = self.pool * (1 - (1 - 8 / self.pool) ** tokens) if self.step_bytes.experts else 0.0
        return (self.step_bytes.fixed + distinct * self.step_bytes.expert) / SPEED, distinct

    def step(self, sure: float, truth: float, depth: int = 8, source: str | None = None, key: int = 0) -> int:
        """One request with a block of equal confidences. -> tokens emitted."""
        paid = self.controller.ask([key], [depth])[0]
        own = source or next(iter(self.costs))
        right = 0
        while right < depth and self.rng.random() < truth:
            right += 1
        draft = Draft()
        if paid or own not in self.costs:
            whole = Draft([1 if place < right else 2 for place in range(depth)], [sure] * depth, own)
            draft = whole.first(1) if own == "mtp" else whole
            while own == "mtp" and len(draft) < depth and self.controller.more([draft])[0]:
                draft = whole.first(len(draft) + 1)
        verified = self.controller.cut([draft])[0]
        emitted = [1] * (min(right, verified) + 1)
        if verified <= right and verified < len(draft):  # the token after the verified ones is the model's own
            emitted[-1] = 1 if verified < right else 3
        elif right < verified:
            emitted[-1] = 3
        cost = self.costs.get(draft.source, DraftCost())
        draft_s = ((cost.block if len(draft) else 0.0) + cost.token * len(draft)) / SPEED
        verify_s, distinct = self.verify_s(1 + verified)
        self.controller.observe([emitted], verify_s, draft_s, distinct)
        self.paid.append(paid)
        self.depths.append(verified)
        self.seconds += verify_s + draft_s
        self.tokens += len(emitted)
        return len(emitted)


@pytest.mark.parametrize("costs", [MTP, DFLASH])
def test_drafts_that_are_always_wrong_are_given_up_and_looked_at_now_and_then(costs: dict[str, DraftCost]) -> None:
    box = Box(costs)
    for _ in range(1500):
        box.step(sure=0.9, truth=0.0)
    plain, _ = box.verify_s(1)
    assert sum(box.depths[100:]) == 0
    assert 0 < sum(box.paid[100:]) < 100
    assert box.tokens / box.seconds > 0.98 / plain


@pytest.mark.parametrize("costs", [MTP, DFLASH])
def test_drafts_that_are_always_right_are_verified_as_deep_as_they_go(costs: dict[str, DraftCost]) -> None:
    box = Box(costs)
    for _ in range(200):
        box.step(sure=0.99, truth=0.999)
    assert min(box.depths[50:]) == 8


def test_no_draft_is_verified_that_cannot_pay() -> None:
    """A dense model whose every token costs a whole step more: no draft is ever worth it, however sure and free."""
    dear = StepBytes(fixed=1e6, token=5e9)
    controller = DepthController(dear, {})
    for step in range(200):
        controller.ask([0], [8])
        depth = controller.cut([Draft([1] * 8, [0.9] * 8, "lookup")])[0]
        controller.observe([[1] * (depth + 1)], 0.02 * (1 + depth), 0.0)
        if step > 20:
            assert depth == 0


def test_where_verifying_is_free_every_likely_draft_is_verified() -> None:
    controller = DepthController(StepBytes(fixed=5e9), {})
    for _ in range(50):
        controller.ask([0], [8])
        depth = controller.cut([Draft([1] * 8, [0.6] * 8, "lookup")])[0]
        controller.observe([[1] * (depth + 1)], 0.02, 0.0)
    assert depth == 8


@pytest.mark.parametrize("costs", [MTP, DFLASH])
def test_a_text_that_becomes_compressible_is_noticed_and_so_is_the_way_back(costs: dict[str, DraftCost]) -> None:
    box = Box(costs)
    for _ in range(300):
        box.step(sure=0.2, truth=0.02)
    assert sum(box.depths[-20:]) == 0
    woke = 0
    while sum(box.depths[-10:]) < 40:
        box.step(sure=0.98, truth=0.98)
        woke += 1
        assert woke < 120
    slept = 0
    while any(box.depths[-20:]):
        box.step(sure=0.2, truth=0.02)
        slept += 1
        assert slept < 80


def test_overconfidence_on_one_text_is_learned_within_a_few_dozen_tokens() -> None:
    box = Box(DFLASH)
    for _ in range(60):
        box.step(sure=0.95, truth=0.3)
    assert max(box.depths[30:]) <= 3


def test_free_drafts_as_good_as_they_claim_are_not_given_up_for_the_first_few_misses() -> None:
    """New requests one after another, a token more costs a quarter of a step: the likely drafts pay, others do not."""
    rng, controller = random.Random(1), DepthController(StepBytes(fixed=5e9, token=1.5e9), {})
    verified: dict[float, list[int]] = {0.4: [], 0.1: []}
    for step in range(800):
        controller.ask([step // 20], [1])
        sure = rng.choice(list(verified))
        depth = controller.cut([Draft([1], [sure], "lookup")])[0]
        hit = rng.random() < sure
        controller.observe([[1, 2][: 1 + depth] if hit else [3]], 0.02 * (1.0 + 0.24 * depth), 0.0)
        verified[sure].append(depth)
    assert mean(verified[0.4]) > 0.95
    assert mean(verified[0.1]) < 0.03


def test_free_drafts_are_verified_as_deep_as_a_request_has_shown_to_pay() -> None:
    """Matches that went on for ever in one text say little of the next: it starts small, and a few blocks go deep."""
    controller = DepthController(StepBytes(fixed=5e9, token=1e7), {})
    chosen: dict[int, list[int]] = {1: [], 2: []}
    for key, right in ((1, True), (2, False)):
        for _ in range(6):
            controller.ask([key], [15])
            depth = controller.cut([Draft([1] * 15, [0.95] * 15, "lookup")])[0]
            controller.observe([[1] * (depth + 1) if right else [2]], 0.02, 0.0)
            chosen[key].append(depth)
    assert chosen[1] == [3, 9, 15, 15, 15, 15]
    assert chosen[2][0] == 3
    assert max(chosen[2][1:]) == 2


def brute_force(reached: list[list[float]], value: Any) -> float:
    choices = product(*(range(len(block) + 1) for block in reached))
    return max(
        value(sum(depths), sum(sum(block[:d]) for block, d in zip(reached, depths, strict=True))) for depths in choices
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_is_cut_as_well_as_trying_all_combinations_would(seed: int) -> None:
    rng = random.Random(seed)
    controller = DepthController(MOE, {}, budget=12)
    requests = rng.randint(1, 4)
    drafts = [
        Draft([1] * n, [rng.choice([0.02, 0.3, 0.6, 0.9, 0.99]) for _ in range(n)], "lookup")
        for n in (rng.randint(0, 3) for _ in range(requests))
    ]
    controller.ask(list(range(requests)), [4] * requests)
    depths = controller.cut(drafts)
    step = controller._current()
    reached: list[list[float]] = []
    for track, draft in zip(step.tracks, drafts, strict=True):
        right, block = 1.0, []
        for chance in controller._chances(track, draft):
            right *= chance
            block.append(right)
        reached.append(block)
    base = controller._verify_seconds(requests)

    def value(count: int, gain: float) -> float:
        return gain - step.rate * (controller._verify_seconds(requests + count) - base)

    found = sum(sum(block[:d]) for block, d in zip(reached, depths, strict=True))
    assert value(sum(depths), found) == pytest.approx(brute_force(reached, value), abs=0.02)


def test_the_budget_of_tokens_is_kept() -> None:
    controller = DepthController(StepBytes(fixed=5e9), {}, budget=10)
    controller.ask([0, 1, 2], [8, 8, 8])
    assert sum(controller.cut([Draft([1] * 8, [0.99] * 8, "lookup")] * 3)) == 7


def test_limits_are_kept_and_a_request_without_room_is_not_drafted_for() -> None:
    controller = DepthController(MOE, DFLASH)
    assert controller.ask([0, 1], [0, 3])[0] is False
    assert controller.cut([Draft(), Draft([1] * 8, [0.999] * 8, "dflash")])[1] <= 3


def test_forced_tokens_are_free_and_verified() -> None:
    controller = DepthController(MOE, DFLASH)
    for _ in range(30):
        controller.ask([0], [8])
        depth = controller.cut([Draft([1] * 6, [1.0] * 6, "forced")])[0]
        controller.observe([[1] * (depth + 1)], 0.03, 0.0, 20.0)
    assert depth == 6


def test_neither_the_controller_nor_the_option_that_asks_for_it_needs_torch() -> None:
    code = "import sys, stoker.speculate.depth.controller, stoker.speculate.choice; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_same_steps_give_the_same_decisions() -> None:
    runs = []
    for _ in range(2):
        box = Box(MTP, seed=5)
        for step in range(300):
            box.step(sure=0.5 + 0.4 * ((step // 40) % 2), truth=0.4 + 0.5 * ((step // 40) % 2))
        runs.append((box.depths, box.paid))
    assert runs[0] == runs[1]


def test_in_a_batch_each_request_gets_the_depth_its_own_text_deserves() -> None:
    """Two texts that can be guessed beside two that cannot; the drafter is as sure of all of them."""
    controller, keys = DepthController(MOE, DFLASH), [0, 1, 2, 3]
    rng, verified = random.Random(2), [0, 0, 0, 0]
    for step in range(300):
        paid = controller.ask(keys, [8] * 4)
        right = [8 if key < 2 and rng.random() < 0.9 else 0 for key in keys]
        drafts = [
            Draft([1 if place < r else 2 for place in range(8)], [0.9] * 8, "dflash") if p else Draft()
            for r, p in zip(right, paid, strict=True)
        ]
        depths = controller.cut(drafts)
        emitted = [[1] * (min(d, r) + 1) if r else [3] for d, r in zip(depths, right, strict=True)]
        distinct = 120 * (1 - (1 - 8 / 120) ** (4 + sum(depths)))
        seconds = (5e9 + distinct * 2.35e8) / SPEED
        controller.observe(emitted, seconds, 1.2e9 / SPEED if any(paid) else 0.0, distinct)
        if step >= 100:
            verified = [n + d for n, d in zip(verified, depths, strict=True)]
    assert min(verified[:2]) > 4 * 200
    assert max(verified[2:]) < 0.2 * 200


def test_ended_requests_leave_nothing_behind() -> None:
    controller = DepthController(MOE, DFLASH)
    for key in range(500):
        controller.ask([key], [8])
        controller.cut([Draft([1], [0.5], "dflash")])
        controller.observe([[1]], 0.03, 0.005, 9.0)
        controller.forget(key)
    assert not controller._tracks


def test_steps_that_were_not_reported_do_no_harm() -> None:
    controller = DepthController(MOE, DFLASH)
    controller.ask([0], [8])
    controller.cut([Draft([5], [0.9], "dflash")])
    controller.ask([0], [8])  # the step before was not the controller's alone
    controller.cut([Draft()])
    controller.observe([[7]], 0.03, 0.0)
    assert not any(row["seen"] for table in controller.stats()["calibration"].values() for row in table)
    with pytest.raises(RuntimeError, match="call ask"):
        controller.observe([[7]], 0.03, 0.0)


def test_stats_tell_depths_predictions_and_experts() -> None:
    box = Box(DFLASH, pool=30.0)
    for _ in range(200):
        box.step(sure=0.97, truth=0.95)
    stats = box.controller.stats()
    assert stats["steps"] == sum(stats["depths"]) == 200
    assert stats["verified_drafts"] == sum(box.depths)
    assert stats["accepted_drafts"] == box.tokens - 200
    assert stats["step_s"]["predicted"] == pytest.approx(stats["step_s"]["measured"], rel=0.05)
    assert stats["distinct_experts"]["predicted"] == pytest.approx(stats["distinct_experts"]["measured"], rel=0.05)
    assert stats["expert_pool"] == pytest.approx(30.0, rel=0.1)
    (row,) = stats["calibration"]["dflash"]
    assert row["right"] == pytest.approx(0.95, abs=0.03)


def test_a_decision_for_eight_requests_takes_a_bounded_number_of_calls() -> None:
    """Host work per step is counted, not timed: it may grow with drafts, never with how long a request has run."""
    controller = DepthController(MOE, DFLASH)
    keys = list(range(8))
    drafts = [Draft([1] * 15, [0.97] * 15, "dflash")] * 8
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    costs = []
    for step in range(60):
        calls = 0
        sys.setprofile(count if step in (5, 55) else None)
        controller.ask(keys, [15] * 8)
        controller.cut(drafts)
        controller.observe([[1, 1]] * 8, 0.05, 0.005, 60.0)
        sys.setprofile(None)
        costs.append(calls)
    assert costs[55] <= costs[5] + 10
    assert costs[55] < 1200


def test_a_looked_up_guess_has_to_promise_what_drafts_lately_brought() -> None:
    box = Box(DFLASH)
    asked = []
    for truth in [0.97] * 60 + [0.02] * 200:
        box.step(sure=truth, truth=truth)
        paid = box.controller.ask([0], [8])
        asked.append((paid[0], box.controller.rivals()[0]))
        box.controller.cut([Draft()])
        box.controller.observe([[1]], box.verify_s(1)[0], 0.0)
    assert all(rival == 0.0 for paid, rival in asked if not paid)
    assert 4.0 < asked[59][1] < 8.0  # of eight drafts nearly all came true, and making them took some time
    assert asked[-1][1] == 0.0


def test_without_a_drafter_that_costs_something_no_guess_has_a_rival() -> None:
    controller = DepthController(MOE, {})
    controller.ask([0, 1], [8, 8])
    assert controller.rivals() == [0.0, 0.0]


def test_a_draft_of_which_a_grammar_leaves_nothing() -> None:
    """It was paid for and has no tokens: the step is learnt from, and nothing is divided by its length."""
    controller = DepthController(MOE, DFLASH)
    assert controller.ask([0], [8]) == [True]
    assert controller.cut([Draft([], [], "dflash")]) == [0]
    controller.observe([[1]], 0.03, 0.01, 8.0)
    assert controller.stats()["steps"] == 1


@pytest.mark.parametrize("costs", [MTP, DFLASH])
def test_a_probe_of_which_a_grammar_leaves_nothing(costs: dict[str, DraftCost]) -> None:
    """Drafting was given up, is tried again, and every token of the try is forbidden."""
    (source,) = costs
    controller = DepthController(MOE, costs)
    tries = 0
    for _ in range(2000):
        (paid,) = controller.ask([0], [4])
        controller.cut([Draft([], [], source) if paid else Draft()])
        controller.observe([[1]], 0.03, 0.01 * paid, 8.0)
        tries += paid
    assert 3 < tries < 200
    assert controller.stats()["probes"] > 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_drafters_and_grammars_do_the_rules_of_a_step_are_kept(data: st.DataObject) -> None:
    """Any requests, limits, drafts (cut to nothing too), tokens and times: no error, and no depth beyond its limit."""
    controller = DepthController(MOE, data.draw(st.sampled_from([MTP, DFLASH, MTP | DFLASH, {}])), budget=12)
    random_ = data.draw(st.randoms(use_true_random=False))
    for _ in range(40):
        keys = random_.sample(range(6), random_.randint(1, 5))
        limits = [random_.choice([0, 1, 4, 8]) for _ in keys]
        paid = controller.ask(keys, limits)
        assert not any(pays and not limit for pays, limit in zip(paid, limits, strict=True))
        drafts = []
        for pays in paid:
            source = random_.choice(["mtp", "dflash"] if pays else ["lookup", "forced"])
            length = random_.choice([0, 0, 1, 3, 8])
            confidence = [random_.choice([0.0, 0.4, 0.99, 1.0]) for _ in range(length)]
            drafts.append(Draft([random_.randrange(2) for _ in range(length)], confidence, source))
        controller.more(drafts)
        depths = controller.cut(drafts)
        assert all(d <= min(limit, len(draft)) for d, limit, draft in zip(depths, limits, drafts, strict=True))
        assert sum(depths) + len(keys) <= max(12, len(keys))
        if random_.random() < 0.9:
            emitted = [[random_.randrange(2) for _ in range(random_.randint(1, depth + 1))] for depth in depths]
            controller.observe(emitted, random_.choice([0.0, 1e-3, 0.1]), random_.choice([0.0, 1e-3]), None)
        if random_.random() < 0.1:
            controller.forget(random_.choice(keys))
    controller.stats()
