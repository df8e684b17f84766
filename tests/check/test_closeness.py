"""Closeness of two servers' predictions is a lower bound of the true divergence, near it, and refused where it cannot
be had."""

import asyncio
import math

import numpy as np
import pytest

from stoker.bench.target import Target
from stoker.check.closeness import ALL, Near, gap, measure
from stoker.check.passages import KINDS, passages
from stoker.check.predictions import FORCED, Listed, Prediction
from stoker.check.record import Closeness
from stoker.check.run import Watcher
from stoker.check.verdict import MAX_KL, verdict
from tests.check.predicting import PredictingServer


def near(a: PredictingServer, b: PredictingServer, per_kind: int = 2, max_kl: float = MAX_KL) -> Near:
    async def go() -> Near:
        async with (
            a.running(),
            b.running(),
            Target(a.url, name="A") as first,
            Target(b.url, name="B") as second,
        ):
            return await measure([first, second], "1", per_kind, max_kl, 4, Watcher())

    return asyncio.run(go())


def overall(found: Near) -> Closeness:
    assert found.rows, found.notes
    assert found.rows[-1].kind == ALL
    return found.rows[-1]


def true_kl(a: PredictingServer, b: PredictingServer, per_kind: int = 2) -> float:
    found = []
    for texts in passages("1", per_kind).values():
        for text in texts:
            ids = b.ids(text)
            for place in range(1, len(ids)):
                ours, theirs = b.logprobs(ids[:place]), a.logprobs(ids[:place])
                found.append(float((np.exp(ours) * (ours - theirs)).sum()))
    return sum(found) / len(found)


def top(table: np.ndarray, count: int) -> dict[int | str, float]:
    return {int(token): float(table[token]) for token in np.argsort(-table)[:count]}


@pytest.mark.parametrize("noise", [0.05, 0.5, 2.0, 6.0])
@pytest.mark.parametrize("count", [1, 5, 20])
def test_the_bound_is_never_above_the_divergence(noise, count):
    rng = np.random.default_rng(1)
    bounds, truths = [], []
    for _ in range(300):
        logits = rng.normal(0, 3, 300)
        p, q = (each - np.log(np.exp(each).sum()) for each in (logits, logits + rng.normal(0, noise, 300)))
        ours, theirs = top(p, count), top(q, count)
        bounds.append(gap(ours, theirs, min(theirs.values())).kl)
        truths.append(float((np.exp(p) * (p - q)).sum()))
        assert bounds[-1] <= truths[-1] + 1e-9
    if count == 20 and noise <= 2:
        assert sum(bounds) > 0.5 * sum(truths)  # and not far below it, in these wide distributions


def test_predictions_that_agree_are_at_no_distance():
    p = {1: math.log(0.7), 2: math.log(0.2)}
    assert gap(p, p, math.log(0.2)).kl < 1e-6
    assert gap(p, p, math.log(0.2)).rest == pytest.approx(0.1)
    assert gap(p, p, math.log(0.2)).same


def test_a_likely_token_that_the_other_does_not_even_list_is_far():
    ours, theirs = {1: math.log(0.9), 2: math.log(0.05)}, {3: math.log(0.6), 2: math.log(0.01)}
    found = gap(ours, theirs, math.log(0.01))
    assert found.kl > 0.9 * math.log(0.9 / 0.01) - 0.1
    assert not found.same


def test_the_last_of_the_listed_bounds_the_others_even_where_the_text_adds_one():
    listed = tuple(Listed(token, "", math.log(p)) for token, p in ((1, 0.6), (2, 0.3), (9, 1e-6)))
    assert Prediction(listed, top=2).least == pytest.approx(math.log(0.3))
    assert Prediction(listed, top=3).least == pytest.approx(math.log(1e-6))


def test_more_noise_is_further_away_and_the_verdict_follows_the_limit():
    reference = PredictingServer()
    found = [overall(near(PredictingServer(noise), reference)) for noise in (0.0, 0.2, 1.0)]
    assert [row.kl for row in found] == sorted(row.kl for row in found)
    assert found[0].kl == pytest.approx(0, abs=1e-6)
    assert found[0].top1 == 1.0
    assert [row.verdict for row in found] == ["close", "close", "worse"]
    for row, noise in zip(found, (0.0, 0.2, 1.0), strict=True):
        truth = true_kl(PredictingServer(noise), reference)
        assert 0.75 * truth - 1e-6 <= row.kl <= truth + 1e-6
        assert row.low <= row.kl <= row.high
    assert found[2].top1 < found[1].top1 < 1.0


@pytest.mark.parametrize("ways", [("prompt_logprobs",), ("echo",), ("logprobs",)])
def test_every_way_of_telling_gives_the_same_answer(ways):
    whole = overall(near(PredictingServer(0.5), PredictingServer()))
    found = near(PredictingServer(0.5, ways=ways), PredictingServer(ways=ways))
    row = overall(found)
    if ways == ("logprobs",):
        assert row.tokens == 2 * len(KINDS) * FORCED
        assert any("one by one" in note for note in found.notes)
        assert whole.low * 0.8 < row.kl < whole.high * 1.2
    else:
        assert row.tokens == whole.tokens
        assert row.kl == pytest.approx(whole.kl, rel=0.02)  # an echo leaves out the token that stands there if unlikely


def test_servers_that_tell_in_different_ways_are_compared_on_what_both_say():
    row = overall(near(PredictingServer(0.5, ways=("logprobs",)), PredictingServer()))
    assert row.tokens == 2 * len(KINDS) * FORCED
    assert row.kl > 0.03


def test_servers_without_tokenize_are_compared_by_the_texts_of_tokens():
    row = overall(near(PredictingServer(0.5, tokenizes=False), PredictingServer()))
    assert row.kl == pytest.approx(overall(near(PredictingServer(0.5), PredictingServer())).kl, rel=0.02)


def test_a_server_that_lists_only_five_is_asked_for_five():
    server = PredictingServer(1.0, most=5)
    row = overall(near(server, PredictingServer()))
    assert {body["prompt_logprobs"] for body in server.asked[1:]} == {5}
    assert 0.5 * true_kl(PredictingServer(1.0), PredictingServer()) < row.kl


@pytest.mark.parametrize("tokenizes", [True, False])
def test_different_tokenizers_are_refused_with_a_sentence(tokenizes):
    found = near(PredictingServer(shift=7, tokenizes=tokenizes), PredictingServer(tokenizes=tokenizes))
    assert found.rows == []
    assert len(found.notes) == 1
    assert "tokenizers differ" in found.notes[0]


def test_a_server_that_tells_nothing_is_said_and_nothing_guessed():
    found = near(PredictingServer(ways=()), PredictingServer())
    assert found.rows == []
    assert "server A gives no log-probabilities" in found.notes[0]
    found = near(PredictingServer(ways=("logprobs",), tokenizes=False), PredictingServer())
    assert "no /tokenize" in found.notes[0]


def test_texts_whose_requests_fail_are_left_out_and_counted():
    texts = passages("1", 2)["prose"]
    lost = PredictingServer().ids(texts[0])[5]
    found = near(PredictingServer(0.5, fails=f", {lost}, "), PredictingServer())
    row = overall(found)
    assert row.texts < 2 * len(KINDS)
    assert any(f"{2 * len(KINDS) - row.texts} of {2 * len(KINDS)} texts were left out" in note for note in found.notes)


def test_closeness_alone_makes_a_verdict():
    far = near(PredictingServer(1.0), PredictingServer()).rows
    word, said = verdict([], far, {"A": 0, "B": 0}, 0, True, MAX_KL)
    assert word == "worse"
    assert "above the limit of 0.1" in said
    rows = near(PredictingServer(0.05), PredictingServer()).rows
    assert verdict([], rows, {"A": 0, "B": 0}, 0, True, MAX_KL)[0] == "no difference found"
    one = [row for row in rows if row.kind != "code"]
    code = next(row for row in far if row.kind == "code")
    assert "above it for code" in verdict([], [*one, code], {"A": 0, "B": 0}, 0, True, MAX_KL)[1]


def test_texts_come_anew_with_every_seed_and_alike_with_the_same():
    assert passages("1", 3) == passages("1", 3)
    assert not {text for found in passages("1", 3).values() for text in found} & {
        text for found in passages("2", 3).values() for text in found
    }
    for found in passages("1", 8).values():
        assert all(500 < len(text) < 2500 for text in found)
