"""`stoker build` as people meet it: a real process, its output, its exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stoker.cli.main import app
from stoker.errors import StokerError
from tests.support import situations
from tests.support.stand_in_hub import StandInHub


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published")
    situations.intel_int4(root / "int4")
    situations.qwen_fp8(root / "fp8")
    return root


def stoker(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from stoker.cli.main import run; run()", "build", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def test_a_hybrid_from_a_hub_with_every_tensor_accounted_for(published: Path, tmp_path: Path) -> None:
    out = tmp_path / "hybrid"
    with StandInHub(published / "fp8").running() as hub:
        arguments = ("--base", str(published / "int4"), "--shared-experts", "hf:owner/model", "--lm-head", "int8")
        there = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "none-needed"}
        done = stoker(*arguments, "--out", str(out), **there)
    assert done.returncode == 0, done.stderr
    assert "--base: 12 tensors replaced: shared experts come from hf:owner/model\n" in done.stderr
    assert "--shared-experts: 331 tensors not used: this build takes only shared experts (" in done.stderr
    assert "98.3 kB of 2.0 MB fetched" in done.stderr
    assert "MTP: 41 of 41 MTP tensors already mapped: nothing to do\n" in done.stderr
    assert done.stdout.startswith(f"{out}: 6 files, ")
    manifest = json.loads((out / "stoker.json").read_text())
    assert manifest["command"].startswith("stoker build --base ")


def in_this_process(*arguments: str) -> str:
    """The sentence a command ends with; starting Python again for each would take longer than all else."""
    result = CliRunner().invoke(app, ["build", *arguments])
    assert isinstance(result.exception, StokerError)
    return str(result.exception)


def test_an_existing_directory_is_left_alone(published: Path, tmp_path: Path) -> None:
    said = in_this_process("--base", str(published / "int4"), "--out", str(tmp_path))
    assert said == f"{tmp_path} exists already; choose another --out, or replace it with --force."


def test_a_closed_repository_is_one_sentence_with_the_cure(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with StandInHub(published / "fp8", token="other").running() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        said = in_this_process(
            "--base", str(published / "int4"), "--mtp", "hf:owner/model", "--out", str(tmp_path / "out")
        )
    assert "hf auth login" in said
    assert list(tmp_path.iterdir()) == []  # nothing left behind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "lots"], "--memory is 'lots', expected a size such as 1GiB, 512MiB or 4GB."),
        (["--memory", "64MiB"], "--memory is 67.1 MB, expected at least "),
        (["--quantize", "int3"], "--quantize is 'int3', expected int4 or "),
    ],
)
def test_mistakes_are_one_sentence(published: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    said = in_this_process("--base", str(published / "int4"), "--out", str(tmp_path / "out"), *arguments)
    assert said.startswith(message)
