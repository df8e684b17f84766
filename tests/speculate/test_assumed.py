"""Acceptance that is assumed: its mean is exact, and only drafts that could give it are taken."""

import pytest

from stoker.errors import RequestError
from stoker.speculate.assumed import AssumedAcceptance, check_assumed
from stoker.speculate.choice import DraftChoice


@pytest.mark.parametrize(("tokens", "depth"), [(2.6, 2), (1.0, 3), (3.0, 2), (1.37, 1), (7.25, 12)])
def test_the_mean_is_exact_in_the_long_run_and_every_step_is_possible(tokens: float, depth: int) -> None:
    for request in range(3):
        rule = AssumedAcceptance(tokens, request)
        accepted = [rule.accept(depth) for _ in range(1000)]
        assert sum(accepted) / 1000 == pytest.approx(tokens - 1, abs=0.002)
        assert {round(tokens - 1 - 0.5), round(tokens - 1 + 0.5), int(tokens - 1)} >= set(accepted)
        assert 0 <= min(accepted) <= max(accepted) <= depth


def test_requests_do_not_step_alike() -> None:
    rules = [AssumedAcceptance(2.5, request) for request in range(8)]
    assert len({tuple(rule.accept(2) for _ in range(6)) for rule in rules}) > 1


@pytest.mark.parametrize("draft", ["none", "auto", "mtp:auto", "lookup:4", "lookup+mtp:2"])
def test_drafts_that_are_not_made_in_every_step_are_refused(draft: str) -> None:
    check_assumed(None, DraftChoice.parse(draft))
    with pytest.raises(RequestError, match="--draft mtp:K or dflash:K"):
        check_assumed(2.0, DraftChoice.parse(draft))


def test_more_than_the_drafts_can_give_is_refused() -> None:
    check_assumed(3.0, DraftChoice.parse("mtp:2"))
    check_assumed(5.5, DraftChoice.parse("dflash:12"))
    for tokens in (0.9, 3.1):
        with pytest.raises(RequestError, match=f"is {tokens:g} tokens a step; with 2 drafts a step they are 1 to 3"):
            check_assumed(tokens, DraftChoice.parse("mtp:2"))
