"""Patterns of a quantization_config come from files: no pattern takes longer than it may, and the offender is named."""

import time
from typing import Any

import pytest

from stoker.errors import CheckpointError
from stoker.weights.formats import patterns as module
from stoker.weights.formats.patterns import Pattern, Patterns
from stoker.weights.formats.rules import formats_in

LONG = f"model.layers.0.{'a' * 60}"
HEADER = {f"{LONG}.weight": ("BF16", (64, 64)), "lm_head.weight": ("BF16", (64, 64))}
CATASTROPHES: dict[str, tuple[dict[str, Any], str]] = {
    "ignore": ({"quant_method": "compressed-tensors", "ignore": ["re:.*(a+)+b$"]}, "ignore has 're:.*(a+)+b$'"),
    "targets": (
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["re:(.*)*x$"], "weights": {}}}},
        "targets has 're:(.*)*x$'",
    ),
    "dynamic": ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:(.*)*x$": {}}}, "dynamic has '-:(.*)*x$'"),
    "extra_config": (
        {"quant_method": "auto-round", "bits": 4, "extra_config": {"(a+)+b$": {"bits": 16}}},
        "extra_config has '(a+)+b$'",
    ),
    "globs": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*a" * 12 + "*b"]}, "ignore has '*a*a",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CATASTROPHES)
def test_a_pattern_that_takes_for_ever_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.3)
    config, sentence = CATASTROPHES[name]
    started = time.monotonic()
    (error,) = formats_in(HEADER, config).errors
    assert sentence in str(error)
    assert "took more than 0.3 s" in str(error)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("text", ["(", "(" * 900, "a{1,99999999999999999999}", "(?P<x>a)(?P<x>b)"])
def test_what_is_no_pattern_is_refused_by_name(text: str) -> None:
    find = Patterns(["a"]).first("ignore", "match", [Pattern(text, f"re:{text}")])
    with pytest.raises(CheckpointError, match=r"quantization_config ignore has 're:.*no valid pattern"):
        find("a")


def test_number_and_length_of_patterns_are_bounded() -> None:
    with pytest.raises(CheckpointError, match=r"a pattern of 1,001 characters, 'a\.\.\.|a pattern of 1,001"):
        Patterns(["a"]).first("ignore", "match", [Pattern("a" * 1001, "a" * 1001)])("a")
    with pytest.raises(CheckpointError, match="holds 10,001 patterns, expected at most 10,000"):
        Patterns(["a"]).first("ignore", "match", [Pattern("a", "a")] * 10_001)("a")


def test_config_groups_are_bounded() -> None:
    groups = {f"g{i}": {"targets": ["Linear"]} for i in range(101)}
    (error,) = formats_in(HEADER, {"quant_method": "compressed-tensors", "config_groups": groups}).errors
    assert "has 101 config_groups, expected at most 100" in str(error)


def test_the_first_pattern_that_fits_decides_and_each_list_matches_in_its_own_way() -> None:
    names = ["xab", "ab", "abc", "b"]
    patterns = Patterns(names)
    lists = [
        patterns.first("one", "search", [Pattern("b", "B"), Pattern("ab", "AB")]),
        patterns.first("two", "match", [Pattern("abc", "ABC"), Pattern("a", "A")]),
        patterns.first("three", "fullmatch", [Pattern("ab?c?", "ALL")]),
        patterns.first("four", "match", []),
    ]
    assert [[find(name) for find in lists] for name in names] == [
        ["B", None, None, None],
        ["B", "A", "ALL", None],
        ["B", "ABC", "ALL", None],
        ["B", None, None, None],
    ]


def test_without_patterns_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Sandbox", None)
    config = {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {}}
    assert not formats_in(HEADER, config).findings
