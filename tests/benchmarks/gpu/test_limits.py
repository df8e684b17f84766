"""Limits beside served rows: what a step reads over the bandwidth, what a prompt computes over the rate."""

from typing import Any

import pytest
from benchmarks.gpu.limits import Card, Limits, beside

from stoker.checkpoint.inspect.report import inspect
from stoker.demo import EMBEDDED
from stoker.sizes.step import Draft

SLOW_PRODUCTS, SLOW_MEMORY = Card(1e15, 1e9), Card(1e6, 1e18)


def test_a_step_reads_its_weights_once_and_each_stream_its_own_past() -> None:
    limits = Limits.of(EMBEDDED, SLOW_MEMORY, Draft(), 1.0)
    fixed = sum(inspect(EMBEDDED).weights.fixed.values()) / 1e6
    assert limits.decode_s(1, 1, context=0) > fixed
    assert limits.decode_s(8, 1, context=0) < 8 * limits.decode_s(1, 1, context=0)
    assert limits.decode_s(1, 10, context=5000) > 10 * limits.decode_s(1, 1, context=0)
    drafted = Limits.of(EMBEDDED, SLOW_MEMORY, Draft("mtp", 2), 3.0)
    assert drafted.decode_s(1, 30, context=0) < limits.decode_s(1, 30, context=0)


def test_a_prompt_is_bound_by_its_products_and_looks_back() -> None:
    limits = Limits.of(EMBEDDED, SLOW_PRODUCTS, Draft(), 1.0)
    one = limits.prompt_s(1, 1000, 0)
    assert limits.prompt_s(2, 1000, 0) == pytest.approx(2 * one)
    assert 2 * one < limits.prompt_s(1, 2000, 0) == pytest.approx(one + limits.prompt_s(1, 2000, 1000))


def test_the_limit_and_what_was_reached_of_it_stand_beside_a_row() -> None:
    asked = {"streams": 2, "prompt_tokens": 100, "cached_tokens": 0, "completion_tokens": 50}
    row: dict[str, Any] = {"name": "decode", **asked, "seconds": 1e3}
    limits = Limits.of(EMBEDDED, SLOW_MEMORY, Draft(), 1.0)
    share = beside([row], limits)
    assert row["limit_s"] == pytest.approx(limits.prompt_s(2, 100, 0) + limits.decode_s(2, 49, 125), abs=1e-4)
    assert share == row["of_limit"] == pytest.approx(row["limit_s"] / 1e3, abs=1e-3)
