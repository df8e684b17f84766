"""Killed, resumed, refused: the result is the same to the byte, and nothing half-built is ever taken for whole."""

import json
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch

from stoker.backends.network.load import load_model
from stoker.checkpoint.build import BuildOptions, build
from stoker.checkpoint.build.shards import Advance, Shard, write_shard
from stoker.checkpoint.build.workspace import Workspace, WorkspaceError
from stoker.errors import StokerError
from tests.checkpoint.build.conftest import CopyOf, Published
from tests.checkpoint.build.result import bytes_of

SHARD = 160 << 10


def run(options: BuildOptions, out: Path) -> None:
    torch.set_num_threads(1)
    build(options, out)


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Processes that start at once: the server they are forked from has torch loaded and has not used it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stoker.checkpoint.build", __name__])
    return context


def _written(partial: Path) -> int:
    total = 0
    for folder, _, files in os.walk(partial):
        for name in files:
            try:
                total += os.path.getsize(os.path.join(folder, name))
            except OSError:  # renamed meanwhile
                continue
    return total


def test_kill_9_at_ten_random_moments(published: Published, tmp_path: Path, processes: ForkServerContext) -> None:
    fp8, drafter = published("qwen_fp8"), published("drafter")
    options = BuildOptions(published("intel_int4"), fp8, lm_head="int8", drafter=drafter, shard_bytes=SHARD)
    build(options, tmp_path / "uninterrupted")
    expected = bytes_of(tmp_path / "uninterrupted")
    assert len(expected) > 15
    size = sum(path.stat().st_size for path in (tmp_path / "uninterrupted").rglob("*") if path.is_file())
    chance = random.Random(0)
    killed = 0
    for moment in range(10):
        out = tmp_path / f"killed-{moment}"
        partial = out.with_name(f"{out.name}.partial")
        process = processes.Process(target=run, args=(options, out))
        process.start()
        threshold = chance.random() * size
        while process.is_alive() and not out.exists() and _written(partial) < threshold:
            time.sleep(0.001)
        time.sleep(chance.random() * 0.02)
        assert process.pid is not None
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        killed += process.exitcode == -signal.SIGKILL
        # config.json is written last: where it is, everything is, whether or not the rename was still done
        for directory in (out, partial, partial / "result"):
            if (directory / "config.json").exists():
                assert bytes_of(directory) == expected
            else:
                with pytest.raises(StokerError):
                    load_model(directory)
        if partial.exists():
            build(options, out)
        assert bytes_of(out) == expected
        assert not partial.exists()
    assert killed >= 5


def test_files_that_are_done_are_not_written_again(
    published: Published, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = BuildOptions(published("intel_int4"), shard_bytes=SHARD)
    written: list[str] = []
    broken = [True]

    def watched(path: Path, shard: Shard, block: int, advance: Advance) -> None:
        if broken[0] and len(written) == 3:
            raise OSError("no more")
        written.append(path.name)
        write_shard(path, shard, block, advance)

    monkeypatch.setattr("stoker.checkpoint.build.run.write_shard", watched)
    with pytest.raises(OSError, match="no more"):
        build(options, out)
    broken[0] = False
    said: list[str] = []
    build(options, out, say=said.append)
    again = set(written[:3]) & set(written[3:])
    assert len(again) <= 1  # the one whose hash was not recorded yet
    assert any(line.startswith("resuming: ") for line in said)


def _interrupted(options: BuildOptions, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("stoker.checkpoint.build.run._finish", lambda *rest: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build(options, out)
    assert out.with_name("built.partial").exists()


def test_other_arguments_do_not_go_on_with_someone_elses_build(
    published: Published, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = BuildOptions(published("intel_int4"), lm_head="int8")
    _interrupted(options, out, monkeypatch)
    message = r"belongs to another build: --lm-head was 'int8' there and is '' now.*--lm-head int8 --out .*Remove"
    with pytest.raises(WorkspaceError, match=message):
        build(BuildOptions(published("intel_int4")), out)
    build(options, out)


def test_sources_that_changed_are_noticed(copy_of: CopyOf, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = copy_of("intel_int4")
    options = BuildOptions(str(base))
    _interrupted(options, out, monkeypatch)
    os.utime(base / "model-00001-of-00002.safetensors", ns=(1, 1))
    with pytest.raises(WorkspaceError, match=r"model-00001-of-00002.safetensors changed since this build was begun"):
        build(options, out)


def test_another_version_does_not_mix_its_bytes_in(
    published: Published, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = BuildOptions(published("intel_int4"))
    _interrupted(options, out, monkeypatch)
    monkeypatch.setattr("stoker.__version__", "9.9")
    with pytest.raises(WorkspaceError, match=r"was begun with stoker .* this is stoker 9\.9"):
        build(options, out)


def test_an_existing_directory_is_never_overwritten(published: Published, out: Path) -> None:
    options = BuildOptions(published("intel_int4"))
    build(options, out)
    before = bytes_of(out)
    with pytest.raises(WorkspaceError, match=r"exists already; choose another --out, or replace it with --force"):
        build(BuildOptions(published("intel_int4"), lm_head="int8"), out)
    assert bytes_of(out) == before
    build(BuildOptions(published("intel_int4"), lm_head="int8"), out, force=True)
    assert bytes_of(out) != before
    assert {path.name for path in out.parent.iterdir()} == {"built"}


def test_force_replaces_nothing_that_a_build_did_not_make(published: Published, out: Path) -> None:
    out.mkdir()
    (out / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(WorkspaceError, match=r"holds no stoker\.json.*--force replaces nothing else"):
        build(BuildOptions(published("intel_int4")), out, force=True)
    assert (out / "thesis.txt").exists()


def test_out_may_not_lie_in_a_source(copy_of: CopyOf) -> None:
    base = copy_of("intel_int4")
    for out in (base, base / "inside", base.parent):
        with pytest.raises(WorkspaceError, match="lie in one another"):
            build(BuildOptions(str(base)), out, force=True)


def test_two_builds_do_not_share_a_directory(published: Published, out: Path) -> None:
    with (
        Workspace(out, force=False).locked(),
        pytest.raises(WorkspaceError, match="another stoker build is writing"),
    ):
        build(BuildOptions(published("intel_int4")), out)


def test_killed_between_the_rename_and_tidying_up_it_is_finished(
    published: Published, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = BuildOptions(published("intel_int4"))
    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "tidy", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build(options, out)
    report = build(options, out)
    assert report.files == json.loads((out / "stoker.json").read_text())["files"]
    assert not out.with_name("built.partial").exists()


def test_too_little_disk_is_said_before_writing(
    published: Published, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(WorkspaceError, match=r"the result needs .* more in .*, where 1\.0 kB are free"):
        build(BuildOptions(published("intel_int4")), out)


def test_the_manifest_tells_where_everything_is_from_and_hashes_every_file(published: Published, out: Path) -> None:
    base = published("intel_int4")
    build(BuildOptions(base, lm_head="int8"), out)
    manifest = json.loads((out / "stoker.json").read_text())
    hashes = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    assert hashes == {name: digest for name, digest in bytes_of(out).items() if name != "stoker.json"}
    assert manifest["command"] == f"stoker build --base {base} --lm-head int8"
    (source,) = manifest["sources"]
    assert source["path"] == base
    assert source["files"]["model_extra_tensors.safetensors"]["bytes"] > 0
    assert manifest["rules"]["--base"] == ["432 tensors copied unchanged", "1 tensor quantised to int8-row"]
    assert set(manifest["versions"]) == {"stoker", "torch", "python"}


def test_a_manifest_names_sources_as_the_user_did(copy_of: CopyOf, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = copy_of("intel_int4")
    monkeypatch.chdir(base.parent)
    build(BuildOptions(base.name, lm_head="int8"), out)
    text = (out / "stoker.json").read_text()
    assert json.loads(text)["sources"][0]["path"] == base.name
    assert str(base.parent) not in text
