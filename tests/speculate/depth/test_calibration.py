"""What the controller believes about drafts becomes what is true of them."""

import random

import pytest

from stoker.speculate.depth.calibration import Calibration


def chance(known: Calibration, place: int, confidence: float) -> float:
    return known.chances([confidence] * (place + 1), 0.0, start=place)[0]


def taught(rates: dict[float, float], count: int, place: int = 0, known: Calibration | None = None) -> Calibration:
    """Drafts of these confidences come true that often."""
    rng, known = random.Random(1), known or Calibration()
    for _ in range(count):
        confidence = rng.choice(list(rates))
        known.add(place, confidence, rng.random() < rates[confidence])
    return known


@pytest.mark.parametrize("rates", [{0.95: 0.6, 0.4: 0.1}, {0.6: 0.9, 0.1: 0.5}, {0.995: 0.2}])
def test_it_converges_on_what_happens_whatever_the_drafter_claims(rates: dict[float, float]) -> None:
    known = taught(rates, 600 * len(rates))
    for confidence, rate in rates.items():
        assert chance(known, 0, confidence) == pytest.approx(rate, abs=0.08)


def test_before_anything_was_seen_the_drafter_is_believed() -> None:
    known = Calibration()
    for confidence in (0.1, 0.4, 0.6, 0.89, 0.98):
        assert chance(known, 3, confidence) == pytest.approx(confidence, abs=0.03)


def test_places_differ_where_they_are_seen_to_differ_and_share_what_they_have_in_common() -> None:
    known = taught({0.9: 0.9}, 400, place=0)
    assert chance(known, 12, 0.9) == pytest.approx(0.9, abs=0.05)  # never seen: what its confidence is worth
    taught({0.9: 0.3}, 400, place=5, known=known)
    assert chance(known, 5, 0.9) < 0.45


def test_a_place_condemned_in_one_text_recovers_while_only_others_are_seen() -> None:
    known = taught({0.9: 0.05}, 300, place=9)
    assert chance(known, 9, 0.9) < 0.2
    taught({0.9: 0.95}, 3000, place=0, known=known)
    assert chance(known, 9, 0.9) > 0.85


def test_the_table_lists_only_what_was_seen() -> None:
    table = taught({0.95: 0.5}, 100).table()
    assert [row["confidence"] for row in table] == [0.95]
    assert table[0]["right"] == pytest.approx(0.5, abs=0.15)


def test_a_shift_moves_log_odds_and_hopeless_tails_are_left_out() -> None:
    known = Calibration()
    assert known.chances([0.4], 1.0)[0] > known.chances([0.4], 0.0)[0] > known.chances([0.4], -1.0)[0]
    assert len(known.chances([0.1] * 15, 0.0, least=0.02)) == 2
    whole = known.chances([0.9, 0.5, 0.99, 0.6], 0.3)
    assert known.chances([0.9, 0.5, 0.99, 0.6], 0.3, start=2) == whole[2:]
