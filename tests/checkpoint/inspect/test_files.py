"""Files that are damaged in ways no download produces are described, never trusted, and never stop the report."""

import json
import random
from pathlib import Path

import pytest

from stoker.checkpoint.inspect.report import inspect
from stoker.weights.checkpoint import Checkpoint
from stoker.weights.headers import Reads
from tests.support import situations


def write(path: Path, header: bytes, data: bytes = bytes(64)) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (b"[]", "a header that is a JSON list"),
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a": 1}', "a has a malformed header entry, 1"),
        (b'{"a": {"dtype": "F32", "shape": [4]}}', "malformed"),
        (b'{"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}', "malformed"),
        (b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}', "malformed"),
        (b'{"a": {"dtype": "F32", "shape": "four", "data_offsets": [0, 16]}}', "malformed"),
        (b'{"a": {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}}', "malformed"),
        (b'{"a": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}', "a has dtype 'F99', expected one of"),
        (
            b'{"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}',
            "needs 20 bytes and its header gives it 16",
        ),
        (b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [64, 100]}}', "is cut short"),
        (
            b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},'
            b' "b": {"dtype": "F32", "shape": [4], "data_offsets": [12, 28]}}',
            "a and b share bytes",
        ),
        (
            b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},'
            b' "a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 32]}}',
            "names 1 tensor twice in its header, first a",
        ),
    ],
)
def test_headers_that_make_no_sense(header: bytes, sentence: str, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", header)
    problems = Checkpoint.scan(tmp_path, Reads()).problems
    assert any(sentence in problem.message for problem in problems), problems
    assert inspect(tmp_path).errors


def test_bytes_that_no_tensor_owns_are_noted(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    write(tmp_path / "model.safetensors", json.dumps(header).encode())
    (problem,) = Checkpoint.scan(tmp_path, Reads()).problems
    assert (problem.severity, problem.message) == (
        "note",
        "model.safetensors has 48 bytes behind its last tensor that no tensor owns.",
    )


def test_damage_anywhere_in_a_header_never_raises(tmp_path: Path) -> None:
    situations.bf16(tmp_path)
    path = tmp_path / "model-00002-of-00002.safetensors"
    whole = path.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(0)
    for _ in range(60):
        broken = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            broken[rng.randrange(length)] = rng.randrange(256)
        path.write_bytes(bytes(broken))
        inspect(tmp_path).to_json()


def test_small_files_left_behind_in_a_copy_are_missed(tmp_path: Path) -> None:
    situations.intel_int4(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    unfinished = tmp_path / ".cache" / "huggingface" / "download" / "abc.incomplete"
    unfinished.parent.mkdir(parents=True)
    unfinished.write_bytes(b"")
    report = inspect(tmp_path)
    notes = "\n".join(problem.message for problem in report.problems)
    assert not report.errors
    for part in ("no chat template", "names 1 stop token(s)", "1 pickle file(s)", "1 unfinished download(s)"):
        assert part in notes


def test_several_files_without_an_index_are_noted(tmp_path: Path) -> None:
    situations.intel_int4(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    report = inspect(tmp_path)
    assert not report.errors
    assert any("There is no model.safetensors.index.json beside 3" in p.message for p in report.problems)


def test_a_quantization_config_of_the_wrong_types_is_an_error(tmp_path: Path) -> None:
    situations.intel_int4(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["bits"] = "four"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (error,) = inspect(tmp_path).errors
    assert error.message.startswith("quantization_config (auto-round) holds a value of the wrong kind: ")


def test_a_drafter_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "dflash_config": {}}')
    report = inspect(tmp_path)
    assert report.architecture == "dflash"
    assert any("DFlash drafter" in error.message for error in report.errors)
