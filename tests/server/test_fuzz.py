"""Made-up requests to every endpoint, sound ones and broken ones: none is a server error, none holds a neighbour up."""

import pytest

from tests.server.fuzz.cases import case
from tests.server.fuzz.run import Report, run
from tests.support.extent import ALL

CASES, WARM_UP = (20_000, 400) if ALL else (500, 0)
STALL_S = 1.0 if ALL else 3.0  # other tests take their share of the machine beside the short one
GROWTH_MB = 50.0


@pytest.fixture(scope="module")
def report() -> Report:
    return run(CASES, WARM_UP)


def test_a_number_is_always_the_same_request() -> None:
    assert [str(case(number)) for number in range(50)] == [str(case(number)) for number in range(50)]


def test_every_request_is_answered_as_its_api_says(report: Report) -> None:
    told = [f"{result.problem}\n{case(result.number)}" for result in report.problems]
    assert not told, "\n\n".join(told[:5])
    assert report.count("200") > CASES / 5, report.statuses
    assert report.count("400") > CASES / 5, report.statuses
    assert report.tracebacks == report.restarts == 0


def test_nobody_beside_them_is_held_up(report: Report) -> None:
    assert not report.neighbour["failures"]
    assert report.neighbour["chunks"] > CASES / 10
    assert report.gap < STALL_S, report.neighbour["gaps"]


@pytest.mark.long
def test_memory_is_back_afterwards(report: Report) -> None:
    assert report.memory_after < report.memory_before + GROWTH_MB
