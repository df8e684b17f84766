"""On the embedded model, served: a damaged copy is found, the model itself is not, and the bound is near the truth.

The long form, with every format, is `python -m benchmarks.server.check_formats`.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.server import check_formats, format_copies
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from stoker.backends.network.load import load_model
from stoker.check.passages import passages
from stoker.check.probes import ASKED, BESIDE, DRAFTS, SEED
from stoker.check.verdict import MAX_KL
from stoker.cli.main import app
from stoker.demo import EMBEDDED
from stoker.engine.tokenizer import Tokenizer
from tests.server.running import Running

TEXTS = 2  # of each kind


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with the INT4 scales of one layer halved, as a wrong convention of a format would."""
    copy = tmp_path_factory.mktemp("halved") / "model"
    shutil.copytree(EMBEDDED, copy, ignore=shutil.ignore_patterns("drafter"))
    for file in copy.glob("*.safetensors"):
        weights = load_file(file)
        for name in weights:
            if name.startswith("model.layers.4.") and name.endswith(".scales"):
                weights[name] = weights[name] / 2
        save_file(weights, file)
    return copy


@pytest.fixture(scope="module")
def servers(halved: Path) -> Iterator[tuple[str, str]]:
    """The embedded model, which drafts, and its damaged copy."""
    running = [
        Running("--model", "demo", "--users", "8", "--device", "cpu"),
        Running("--model", str(halved), "--draft", "none", "--users", "4", "--device", "cpu"),
    ]
    try:
        yield running[0].wait().url, running[1].wait().url
    finally:
        for each in running:
            each.stop()


def checked(*arguments: str, file: Path) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["check", *arguments, "--json", str(file), "--fresh"])
    assert done.exit_code in (0, 1), done.output
    found: dict[str, Any] = json.loads(file.read_text())
    assert (done.exit_code == 1) == (found["verdict"] == "worse")
    return found


def closeness(first: str, second: str, file: Path) -> dict[str, Any]:
    return checked(first, "--against", second, "--suite", "closeness", "--texts", str(TEXTS), file=file)


def test_a_damaged_copy_is_worse_and_by_as_much_as_is_true(servers: tuple[str, str], halved: Path, tmp_path: Path):
    sound, damaged = servers
    found = closeness(damaged, sound, tmp_path / "a.json")
    assert found["verdict"] == "worse"
    assert found["notes"] == []
    row = found["closeness"][-1]
    assert row["kind"] == "all"
    assert row["low"] > MAX_KL
    tokenizer = Tokenizer(EMBEDDED)
    texts = [tokenizer.encode(text) for each in passages("1", TEXTS).values() for text in each]
    p, q = (
        check_formats.log_probabilities(load_model(directory, torch.float32), texts) for directory in (EMBEDDED, halved)
    )
    assert row["tokens"] == len(p)
    truth = float((p.exp() * (p - q)).sum(-1).mean())
    assert row["kl"] < 1.05 * truth
    told = check_formats.gaps(p, q)  # all that lists of twenty tokens tell of this truth
    assert row["kl"] == pytest.approx(sum(each.kl for each in told) / len(told), rel=0.05)
    assert row["rest"] == pytest.approx(sum(each.rest for each in told) / len(told), abs=0.01)
    assert row["kl"] > truth / 2  # the least share that docs/check.md has, of a copy further away, is 53 %
    assert row["top1"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()), abs=0.02)


def test_a_server_is_as_close_to_itself_as_can_be(servers: tuple[str, str], tmp_path: Path):
    found = closeness(servers[0], servers[0], tmp_path / "a.json")
    assert found["verdict"] == "no difference found"
    assert all(row["kl"] < 1e-5 and row["top1"] == 1.0 for row in found["closeness"])


def test_answers_depend_neither_on_neighbours_nor_on_drafts_and_a_seed_reproduces(
    servers: tuple[str, str], tmp_path: Path
):
    found = checked(servers[0], "--suite", "full", "--items", "2", file=tmp_path / "a.json")
    probed = {row["name"]: row for row in found["sanity"] if row["name"] in (BESIDE, SEED, DRAFTS)}
    assert set(probed) == {BESIDE, SEED, DRAFTS}
    for row in probed.values():
        assert (row["counts"], row["of"]) == ({"A": 0}, {"A": ASKED}), row


@pytest.mark.long
def test_closeness_orders_the_formats_as_the_truth_does(tmp_path: Path):
    made = format_copies.make(tmp_path / "copies")
    truths = {seed: check_formats.truth(made, 4, seed, jobs=2) for seed in ("1", "2")}
    seen = check_formats.compare_copies(made, 4, tmp_path, jobs=1)
    found = check_formats.judged({"same texts": truths["1"], "other texts": truths["2"]}, seen)
    assert found["order_by_closeness"] == found["order_by_true_kl"]
    assert found["worse"] == found["truly_above"]
