"""Whatever is changed in the files of a checkpoint, inspect reports it and loading loads or refuses: no other
exception, nothing that a terminal obeys, and soon."""

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.backends.network.load import load_model
from stoker.checkpoint.inspect.report import inspect
from stoker.errors import StokerError
from stoker.weights.checkpoint import INDEX
from tests.support import situations

FILES = ("config.json", INDEX, situations.EXTRA)
SECONDS = 20.0  # for one of them, on a machine that is busy
fuzz = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))

STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([2**31, 2**63, 2**64, 10**18, 10**4000, -(10**18), 0.5, 1e300, 1e-300, float("inf"), float("nan")]),
    st.text(st.characters(), max_size=4),
    st.sampled_from(["", "\x1b[2J", "\ud800", "\u202e", "a" * 5000, "re:(.*)*x$", "[red]x[/red]", "../..", "\0"]),
    st.sampled_from([[], {}, [[]], [None] * 3, ["Linear"], {"a": {}}, list(range(20_000))]),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    situations.intel_int4(directory)
    return directory


@pytest.fixture(scope="module")
def copy(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(whole, tmp_path_factory.mktemp("fuzzed") / "copy"))


def check(directory: Path) -> None:
    started = time.monotonic()
    report = inspect(directory)
    json.dumps(report.to_json())
    said = [report.architecture, *(part for problem in report.problems for part in (problem.message, problem.fix))]
    try:
        load_model(directory, device="meta")
    except StokerError as error:
        said.append(str(error))
    for text in said:
        assert text.isprintable()
        assert len(text) < 3000
    assert time.monotonic() - started < SECONDS


def replace_one(value: Any, chooser: random.Random, strange: Any) -> Any:
    """`value` with one of its parts, at any depth, removed, doubled under another name, or replaced."""
    if not isinstance(value, dict | list) or not value or chooser.random() < 0.2:
        return strange
    made = value.copy()
    key = chooser.choice(list(made) if isinstance(made, dict) else range(len(made)))
    if chooser.random() < 0.1:
        del made[key]
    elif isinstance(made, dict) and chooser.random() < 0.1:
        made[str(strange)] = made[key]
    else:
        made[key] = replace_one(made[key], chooser, strange)
    return made


@pytest.mark.parametrize("name", FILES)
@fuzz
@given(seed=st.integers(0, 2**32), strange=STRANGE)
def test_any_value_in_any_place(name: str, whole: Path, copy: Path, seed: int, strange: Any) -> None:
    chooser = random.Random(seed)

    def change(text: bytes) -> bytes:
        return json.dumps(replace_one(json.loads(text), chooser, strange)).encode()

    _with(name, whole, copy, change)


@pytest.mark.parametrize("name", FILES)
@fuzz
@given(seed=st.integers(0, 2**32), count=st.integers(1, 4), insert=st.binary(max_size=6))
def test_any_bytes_in_any_place(name: str, whole: Path, copy: Path, seed: int, count: int, insert: bytes) -> None:
    chooser = random.Random(seed)

    def change(text: bytes) -> bytes:
        made = bytearray(text)
        for _ in range(count):
            at = chooser.randrange(len(made))
            made[at : at + chooser.randrange(3)] = insert or bytes([chooser.randrange(256)])
        return bytes(made)

    _with(name, whole, copy, change)


def _with(name: str, whole: Path, copy: Path, change: Callable[[bytes], bytes]) -> None:
    """Checks the copy with one file changed, of safetensors the header, whose length is kept right."""
    original = (whole / name).read_bytes()
    if name.endswith(".safetensors"):
        length = 8 + int.from_bytes(original[:8], "little")
        header = change(original[8:length])
        (copy / name).write_bytes(len(header).to_bytes(8, "little") + header + original[length:])
    else:
        (copy / name).write_bytes(change(original))
    try:
        with torch.inference_mode():
            check(copy)
    finally:
        (copy / name).write_bytes(original)
