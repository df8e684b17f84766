"""What `benchmarks.lossless` says when a run goes wrong; `tests/engine/test_lossless.py` has what it is for."""

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
from benchmarks.lossless import Unit, covering_set, each, numbers

UNITS: list[Unit] = [(c, c.kv, "sampled", 0, 4, 24) for c in covering_set()[5:9]]


def dying(unit: Unit) -> dict[str, Any]:
    if unit == UNITS[2]:
        os._exit(1)
    return {"tokens": 1}


def failing(unit: Unit) -> dict[str, Any]:
    if unit == UNITS[2]:
        raise RuntimeError("CUDA error")
    return {"tokens": 1}


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (dying, r"died.* at configuration 8 \(mtp fixed, .*\), sampled, prompts 1 to 4\. What"),
        (failing, r"RuntimeError at configuration 8 \(mtp fixed, .*\), sampled, prompts 1 to 4: CUDA error"),
    ],
)
def test_the_unit_that_fails_is_named(run: Callable[[Unit], dict[str, Any]], said: str) -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        results = each(pool, 1, run, UNITS)
        assert [next(results)[0] for _ in range(2)] == UNITS[:2]
        with pytest.raises(SystemExit, match=said):
            next(results)


def test_configurations_are_chosen_by_number() -> None:
    assert numbers("8, 1") == [8, 1]
    for wrong in ("0", "1,", "mtp", f"{len(covering_set()) + 1}"):
        with pytest.raises(argparse.ArgumentTypeError, match="numbers 1 to"):
            numbers(wrong)
