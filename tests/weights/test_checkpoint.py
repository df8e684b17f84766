"""What lies in a checkpoint directory is judged once: loading refuses what inspect calls an error, in its words."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from stoker.checkpoint.inspect.report import inspect
from stoker.errors import CheckpointError, StokerError
from stoker.weights.checkpoint import INDEX, Checkpoint, odd_files
from stoker.weights.model_config import ModelConfig
from stoker.weights.problems import LONGEST, Problem
from tests.support import situations

ENTRY: dict[str, Any] = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


def write(directory: Path, header: Any, data: bytes = bytes(64)) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def both(directory: Path) -> str:
    """The sentence with which loading refuses, which must be the first that inspect says of the files."""
    found = [problem.message for problem in Checkpoint.scan(directory).problems if problem.severity == "error"]
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    sentence = str(caught.value)
    assert found[0] in sentence
    assert found[0] in [problem.message for problem in inspect(directory).errors]
    assert sentence.isprintable()
    return sentence


TWICE = b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},' * 2
FAULTS = {
    "a key twice": (TWICE[:62] + b'"a": ' + json.dumps(ENTRY).encode() + b"}", "names 1 tensor twice in its header"),
    "a field twice": (
        b'{"a": {"dtype": "F64", "dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}',
        "names a field of a tensor twice: dtype",
    ),
    "tensors that share bytes": (
        {"a": ENTRY, "b": ENTRY | {"data_offsets": [12, 28]}}, "a and b share bytes, so at least one of them is wrong",
    ),
    "tensors in one place": (dict.fromkeys("abcdef", ENTRY), "a and b share bytes"),
    "a tensor within another": (
        {"a": ENTRY | {"shape": [16], "data_offsets": [0, 64]}, "b": ENTRY | {"data_offsets": [32, 48]}}, "share bytes",
    ),
    "a terminal's commands": ({"a\x1b]0;owned\x07\x1b[2J": ENTRY}, "a\\x1b]0;owned\\x07\\x1b[2J has characters"),
    "another writing direction": ({"a\u202egnp.b": ENTRY}, "a\\u202egnp.b has characters in its name"),
    "half a character": (b'{"\\ud800": {}}', "\\ud800 has characters in its name that no tensor name has"),
    "an endless name": ({"a" * 100_000: ENTRY}, "… has a name of 100,000 characters, expected at most 1,000"),
    "an endless number": (
        b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 16]}}', "more than 4,000 digits",
    ),
    "a long number": ({"a": ENTRY | {"shape": [10**3000]}}, "malformed"),
    "deep nesting": (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested more than 64 deep"),
    "a shape of many dimensions": ({"a": ENTRY | {"shape": [4] + [1] * 1000}}, "malformed"),
    "a shape that overflows": ({"a": ENTRY | {"shape": [2**62] * 16}}, "in F32 needs 16742321"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_header_is_refused_by_both_in_the_same_words(name: str, tmp_path: Path) -> None:
    header, sentence = FAULTS[name]
    write(tmp_path, header)
    found = both(tmp_path)
    assert sentence in found
    assert str(tmp_path / "model.safetensors") in found
    assert len(found) < 2 * LONGEST


def test_empty_tensors_share_nothing(tmp_path: Path) -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]}
    write(tmp_path, {"a": ENTRY, "b": empty, "c": empty}, bytes(16))
    assert not Checkpoint.scan(tmp_path).problems


def test_gaps_are_noted(tmp_path: Path) -> None:
    write(tmp_path, {"a": ENTRY | {"data_offsets": [4, 20]}, "b": ENTRY | {"data_offsets": [24, 40]}}, bytes(40))
    (note,) = Checkpoint.scan(tmp_path).problems
    assert (note.severity, note.message) == (
        "note",
        "model.safetensors has 8 bytes before or between its tensors that no tensor owns.",
    )


INDICES = {
    "half a character": ({"weight_map": {"a": "x\ud800", "b\ud800": "model.safetensors"}}, "\\ud800"),
    "files of other kinds": ({"weight_map": {"a": ["x"], "b": None, "c": {"d": "e\0"}}}, "does not exist"),
    "a name that no system takes": ({"weight_map": {"a": "x\0y"}}, "x\\x00y"),
    "commands": ({"weight_map": {"a": "\x1b[2J"}}, "\\x1b[2J, which does not exist"),
    "files without end": ({"weight_map": {f"t{i}": f"f{i}" for i in range(50_000)}}, "(50,000 such files)"),
}


@pytest.mark.parametrize("name", INDICES)
def test_a_hostile_index_is_refused_by_both_in_the_same_words(name: str, tmp_path: Path) -> None:
    index, sentence = INDICES[name]
    write(tmp_path, {"a": ENTRY}, bytes(16))
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert sentence in both(tmp_path)
    assert len(Checkpoint.scan(tmp_path).problems) < 20


def test_an_index_nested_without_end(tmp_path: Path) -> None:
    write(tmp_path, {"a": ENTRY}, bytes(16))
    (tmp_path / INDEX).write_text('{"weight_map":' * 5000 + "{}" + "}" * 5000)
    assert "nested more than" in both(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", INDEX, "tokenizer.json", "chat_template.jinja"])
def test_a_named_pipe_is_refused_by_both_at_once(name: str, tmp_path: Path) -> None:
    situations.bf16(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    started = time.monotonic()
    assert f"{name} cannot be read: it is a named pipe, expected a file." in both(tmp_path)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_named_pipe_instead_of_a_config_is_refused_at_once(name: str, tmp_path: Path) -> None:
    situations.bf16(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(StokerError, match="it is a named pipe"):
        ModelConfig.load(tmp_path)
    assert any("it is a named pipe" in error.message for error in inspect(tmp_path).errors)


def test_tokenizers_of_absurd_size_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(10**12)
    (problem,) = odd_files(tmp_path)
    assert problem.message == "tokenizer.json has 1,000,000,000,000 bytes, and at most 100,000,000 are read."


def test_messages_are_bounded_and_safe_to_print() -> None:
    problem = Problem("error", "\x1b[2J\n" + "x" * 10_000, fix="\u202e")
    assert problem.message.startswith("\\x1b[2J\\nxxx")
    assert len(problem.message) < LONGEST + 10
    assert problem.fix == "\\u202e"
