"""A damaged safetensors file is always a CheckpointError that says where it stops making sense, and never anything
else: no other exception, no hang, no memory for sizes that only a broken header claims."""

import json
import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from stoker.errors import CheckpointError
from stoker.weights.headers import MAX_HEADER, read_header
from stoker.weights.reader import read_tensor

BIG = 20_000_000  # bytes read_header may not need for a file of a few kilobytes
ENTRY = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
careful = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headers")


@pytest.fixture(scope="module")
def whole(scratch: Path) -> bytes:
    file = scratch / "whole.safetensors"
    save_file({"model.a.weight": torch.ones(6, 4), "model.b.weight": torch.ones(8, dtype=torch.bfloat16)}, file)
    return file.read_bytes()


def header_size(whole: bytes) -> int:
    return struct.unpack("<Q", whole[:8])[0]


def file_with(header: bytes, path: Path, data: bytes = bytes(64)) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def read_or_refuse(path: Path) -> None:
    """Either a header that adds up, or a CheckpointError of one line; little memory both ways."""
    tracemalloc.start()
    try:
        with suppress(CheckpointError):
            for info in read_header(path).values():
                assert all(n >= 0 for n in info.shape)
                assert 0 <= info.offset <= info.offset + info.nbytes <= path.stat().st_size
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < BIG


def test_a_whole_file_lists_its_tensors(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(whole)
    found = {name: (info.dtype, info.shape, info.nbytes) for name, info in read_header(path).items()}
    assert found == {"model.a.weight": ("F32", (6, 4), 96), "model.b.weight": ("BF16", (8,), 16)}


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99])
def test_a_file_cut_inside_its_header_names_file_and_sizes(whole: bytes, tmp_path: Path, part: float) -> None:
    path = tmp_path / "model-00007-of-00014.safetensors"
    size = int(part * (8 + header_size(whole)))
    path.write_bytes(whole[:size])
    message = refusal(path)
    assert f"{size:,} bytes" in message
    if size >= 8:
        assert f"{header_size(whole):,}" in message


@pytest.mark.parametrize("missing", [1, 16, 17, 111, 112])
def test_a_file_cut_inside_its_data_names_file_tensor_and_sizes(whole: bytes, tmp_path: Path, missing: int) -> None:
    path = tmp_path / "model.safetensors"
    size = len(whole) - missing
    path.write_bytes(whole[:size])
    message = refusal(path)
    assert "cut short" in message
    assert "model.a.weight" in message or "model.b.weight" in message
    assert f"{size:,}" in message


def test_a_file_that_shrinks_after_its_header_was_read(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(whole)
    info = read_header(path)["model.a.weight"]
    path.write_bytes(whole[: info.offset + 40])
    with pytest.raises(CheckpointError, match=r"model\.safetensors .* model\.a\.weight: 40 of 96 bytes"):
        read_tensor(info)


@pytest.mark.parametrize("length", [MAX_HEADER, MAX_HEADER + 1, 2**40, 2**63, 2**64 - 1])
def test_a_garbage_header_length_is_refused_unread(whole: bytes, tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + whole[8:])
    assert f"{length:,}" in refusal(path)
    read_or_refuse(path)  # and without taking that much memory


@pytest.mark.parametrize("header", [b'{"a": ', b"not json", b"\xff\xfe\xfd", b"", b'{"a": 1,}'])
def test_a_header_that_is_not_json_says_so(tmp_path: Path, header: bytes) -> None:
    assert "not JSON" in refusal(file_with(header, tmp_path / "model.safetensors"))


@pytest.mark.parametrize("header", [b"[]", b"3", b"null", b'"text"'])
def test_a_header_that_is_no_object_says_so(tmp_path: Path, header: bytes) -> None:
    assert "expected an object" in refusal(file_with(header, tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F7"},
        {"dtype": None},
        {"shape": 4},
        {"shape": ["x"]},
        {"shape": [5]},
        {"shape": [-2, -2]},
        {"shape": [float("inf")]},
        {"shape": [4.5]},
        {"shape": [10**3000, 10**3000]},
        {"data_offsets": [0]},
        {"data_offsets": [16, 0]},
        {"data_offsets": [-16, 0]},
        {"data_offsets": [0, float("inf")]},
        {"data_offsets": [56, 72]},
    ],
    ids=lambda change: json.dumps(change)[:40],
)
def test_an_entry_that_cannot_be_right_names_its_tensor(tmp_path: Path, change: dict[str, Any]) -> None:
    header = json.dumps({"model.a.weight": ENTRY | change}).encode()
    assert "model.a.weight" in refusal(file_with(header, tmp_path / "model.safetensors"))


def test_a_header_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    refusal(file_with(b"[" * 100_000, path))
    refusal(file_with(b'{"a":' * 50_000, path))


def test_a_tensor_name_with_a_line_break_keeps_the_message_on_one_line(tmp_path: Path) -> None:
    refusal(file_with(json.dumps({"a\nb": {}}).encode(), tmp_path / "model.safetensors"))


@careful
@given(data=st.data())
def test_any_truncation_is_refused(whole: bytes, scratch: Path, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, len(whole) - 1))
    path = scratch / "cut.safetensors"
    path.write_bytes(whole[:size])
    refusal(path)
    read_or_refuse(path)


@careful
@given(data=st.data())
def test_any_damaged_byte_of_the_header_is_read_or_refused(whole: bytes, scratch: Path, data: st.DataObject) -> None:
    place = st.integers(0, 7 + header_size(whole))
    damaged = bytearray(whole)
    for at, value in data.draw(st.lists(st.tuples(place, st.integers(0, 255)), min_size=1, max_size=4)):
        damaged[at] = value
    path = scratch / "flipped.safetensors"
    path.write_bytes(damaged)
    read_or_refuse(path)


NUMBERS = st.one_of(st.integers(), st.integers(0, 20), st.floats(), st.just(float("inf")), st.just(10**4000))
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(["F32", "BF16", "U8", "X"]), ANYTHING),
        "shape": st.one_of(st.lists(NUMBERS, max_size=4), ANYTHING),
        "data_offsets": st.one_of(st.lists(NUMBERS, min_size=2, max_size=2), ANYTHING),
    }
)


@careful
@given(header=st.dictionaries(st.text(max_size=4), st.one_of(ENTRIES, ANYTHING), max_size=3))
def test_any_json_in_the_header_is_read_or_refused(scratch: Path, header: dict[str, Any]) -> None:
    read_or_refuse(file_with(json.dumps(header).encode(), scratch / "odd.safetensors"))
