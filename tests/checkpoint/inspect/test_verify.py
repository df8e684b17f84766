"""--verify: every byte goes by once, in bounded memory; one bad value or one flipped bit anywhere is found."""

import hashlib
import json
import os
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stoker.checkpoint.inspect import verify as verify_module
from stoker.checkpoint.inspect.checksums import Checksum, find_checksums
from stoker.checkpoint.inspect.report import inspect
from stoker.checkpoint.inspect.verify import verify
from stoker.weights.checkpoint import Checkpoint
from stoker.weights.headers import Reads
from tests.checkpoint.inspect.test_full_size import write_hollow
from tests.support import situations


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2],
)
@pytest.mark.parametrize("block", [64, 4 << 20])
def test_one_nan_is_found_wherever_blocks_end(
    dtype: torch.dtype, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "BLOCK", block)
    odd = torch.ones(13, dtype=torch.uint8)  # leaves what follows unaligned
    for at in (0, 57, 199):
        values = torch.linspace(-200, 200, 200).to(dtype)
        values[at] = torch.nan
        save_file({"a": odd, "b": values, "c": torch.ones(50)}, tmp_path / "model.safetensors")
        report = verify(Checkpoint.scan(tmp_path, Reads()))
        (problem,) = report.problems
        assert problem.message == (
            f"model.safetensors: 1 tensor holds NaN or Inf, first b (1 values, the first at element {at})."
        )
        assert report.bytes == (tmp_path / "model.safetensors").stat().st_size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2])
def test_inf_is_found_and_the_largest_finite_value_is_not_taken_for_it(dtype: torch.dtype, tmp_path: Path) -> None:
    largest = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min]).to(dtype)
    save_file({"a": largest}, tmp_path / "model.safetensors")
    assert not verify(Checkpoint.scan(tmp_path, Reads())).problems
    save_file({"a": torch.tensor([1.0, torch.inf, -torch.inf]).to(dtype)}, tmp_path / "model.safetensors")
    (problem,) = verify(Checkpoint.scan(tmp_path, Reads())).problems
    assert "(2 values, the first at element 1)" in problem.message


def test_scales_count_as_floats_and_packed_words_do_not(tmp_path: Path) -> None:
    situations.intel_int4(tmp_path)
    assert not inspect(tmp_path, verify_bytes=True).errors  # the words hold any bits
    name = "model.language_model.layers.1.mlp.experts.0.up_proj.scales"

    def spoil(tensors: situations.Tensors) -> None:
        if name in tensors:
            tensors[name][1, 2] = torch.inf

    for file in tmp_path.glob("*.safetensors"):
        situations.rewrite(file, spoil)
    assert not inspect(tmp_path).errors  # headers alone cannot tell
    (error,) = inspect(tmp_path, verify_bytes=True).errors
    assert error.tensor == name


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git_blob(path: Path) -> str:
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def write_sums(directory: Path) -> None:
    lines = [f"{sha256(path)} *{path.name}" for path in sorted(directory.glob("*.safetensors"))]
    (directory / "weights.sha256").write_text("\n".join(lines) + "\n")


def write_one_sum_per_file(directory: Path) -> None:
    for path in directory.glob("*.safetensors"):
        (directory / f"{path.name}.sha256").write_text(sha256(path).upper())


def write_manifest(directory: Path) -> None:
    """As `stoker build` writes it."""
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in directory.glob("*")}
    (directory / "stoker.json").write_text(json.dumps({"files": files}))


def write_hub_metadata(directory: Path) -> None:
    """As huggingface_hub 2.4 writes it: commit, etag, time."""
    folder = directory / ".cache" / "huggingface" / "download"
    folder.mkdir(parents=True)
    for path in [*directory.glob("*.safetensors"), directory / "config.json"]:
        etag = git_blob(path) if path.suffix == ".json" else sha256(path)
        (folder / f"{path.name}.metadata").write_text(f"{'1' * 40}\n{etag}\n1712656091.123\n")


def make_hub_cache(directory: Path) -> None:
    """Files become links into blobs/, named by etag."""
    blobs = directory.parent / "blobs"
    blobs.mkdir()
    for path in [*directory.glob("*.safetensors"), directory / "config.json"]:
        blob = blobs / (git_blob(path) if path.suffix == ".json" else sha256(path))
        path.rename(blob)
        path.symlink_to(blob)


@pytest.mark.parametrize(
    "manifest", [write_sums, write_one_sum_per_file, write_manifest, write_hub_metadata, make_hub_cache]
)
def test_a_flipped_bit_is_found_by_every_kind_of_checksum(manifest, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    situations.intel_int4(directory)
    manifest(directory)
    report = inspect(directory, verify_bytes=True)
    assert not report.errors
    assert report.verified is not None
    assert report.verified.matching >= 3
    assert not report.verified.without_checksum
    target = (directory / situations.EXTRA).resolve()
    data = bytearray(target.read_bytes())
    data[-1] ^= 1
    target.write_bytes(data)
    (error,) = inspect(directory, verify_bytes=True).errors
    assert error.message.startswith(f"{situations.EXTRA} has sha256 {sha256(target)}, ")
    assert error.fix == f"Fetch {situations.EXTRA} again."


def test_an_edited_config_is_a_note_and_a_missing_file_an_error(tmp_path: Path) -> None:
    situations.intel_int4(tmp_path)
    write_hub_metadata(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text() + "\n")
    (tmp_path / "gone.sha256").write_text(f"{'0' * 64}  gone.safetensors\n")
    problems = {p.file: p for p in inspect(tmp_path, verify_bytes=True).problems if p.file}
    assert problems["config.json"].severity == "note"
    assert problems["gone.safetensors"].severity == "error"


def test_etags_that_are_no_hashes_and_lines_that_are_no_sums_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / ".cache" / "huggingface" / "download"
    folder.mkdir(parents=True)
    (folder / "a.json.metadata").write_text(f'{"1" * 40}\nW/"abc"\n1.0\n')
    (folder / "b.json.metadata").write_text("")
    (tmp_path / "c.sha256").write_text("# nothing here\n\n")
    assert find_checksums(tmp_path) == {}
    (tmp_path / "SHA256SUMS").write_text(f"{'a' * 64}  ./sub/d.safetensors\n{'b' * 64}  ../outside.safetensors\n")
    assert find_checksums(tmp_path) == {"sub/d.safetensors": Checksum("sha256", "a" * 64, "SHA256SUMS")}


def test_memory_is_bounded_and_progress_ends_at_the_total(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_hollow(tmp_path / f"{name}.safetensors", {name: ("BF16", (1 << 25,))})  # 64 MiB each
    files = Checkpoint.scan(tmp_path, Reads())
    seen: list[tuple[int, int]] = []
    tracemalloc.start()
    report = verify(files, progress=lambda done, total: seen.append((done, total)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not report.problems
    assert peak < 4 * verify_module.READERS * verify_module.BLOCK
    assert seen[-1] == (report.bytes, report.bytes) == (sum(files.sizes.values()),) * 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_an_interruption_stops_the_readers(tmp_path: Path) -> None:
    write_hollow(tmp_path / "a.safetensors", {"a": ("BF16", (1 << 28,))})
    calls = []

    def interrupt(done: int, total: int) -> None:
        calls.append(done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(Checkpoint.scan(tmp_path, Reads()), progress=interrupt)
    assert len(calls) == 1


def test_a_file_cut_short_is_still_looked_at(tmp_path: Path) -> None:
    situations.shard_cut_short(tmp_path, missing=63)  # ends inside an element
    report = inspect(tmp_path, verify_bytes=True)
    assert [error.message.split(":")[0] for error in report.errors] == ["model-00002-of-00002.safetensors is cut short"]


@pytest.mark.parametrize(
    "manifest",
    [
        {"files": [1, 2]},
        {"files": "text"},
        {"files": {"model.safetensors": {"sha256": int("1" * 64)}}},
        {"files": {"model.safetensors": {"sha256": ["1" * 64]}, "a\0b": {"sha256": "1" * 64}, "x": None}},
        {"files": {"../../etc/passwd": {"sha256": "1" * 64}, "\ud800": {"sha256": "1" * 64}}},
    ],
    ids=["a list", "a text", "a number", "names", "paths"],
)
def test_a_manifest_that_makes_no_sense_is_no_traceback(manifest: object, tmp_path: Path) -> None:
    situations.bf16(tmp_path)
    (tmp_path / "stoker.json").write_text(json.dumps(manifest))
    json.dumps(inspect(tmp_path, verify_bytes=True).to_json())


@pytest.mark.parametrize("name", ["model.safetensors.sha256", "SHA256SUMS", "model-00001-of-00002.safetensors"])
def test_named_pipes_are_not_waited_for(name: str, tmp_path: Path) -> None:
    situations.bf16(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    assert inspect(tmp_path, verify_bytes=True).verified


def test_a_link_to_nowhere_is_no_traceback(tmp_path: Path) -> None:
    situations.bf16(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    (tmp_path / "model-00002-of-00002.safetensors").symlink_to("gone")
    assert any("cannot be read: No such file" in error.message for error in inspect(tmp_path, verify_bytes=True).errors)
