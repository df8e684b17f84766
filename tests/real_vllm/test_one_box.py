"""`stoker up` with a real vLLM: the embedded model's BF16 export is served, tested, measured, and writes what Stoker
writes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from benchmarks.peers.same_text import Compared, compare

from stoker.engines.vllm_log import read_start
from stoker.up.control import Control
from stoker.up.receipt import Receipt, read
from stoker.up.state import Status
from tests.real_vllm.conftest import PATIENCE_S, ROOT
from tests.support.services import processes_of, state_home, wait

pytestmark = pytest.mark.vllm
PROMPTS, TOKENS, SAME = 50, 16, 45
RECIPE = """\
name = "demo-vllm"
title = "The embedded model's BF16 export on vLLM's CPU build"
engine = "vllm"
engine_version = "==0.32.*"
[model]
source = "{model}"
[serve]
device = "cpu"
context = 8192
users = 4
memory_share = {share}
tool_parser = "qwen3_coder"
reasoning_parser = "qwen3"
"""


def stoker(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "stoker", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)


def status() -> Status:
    found = Control.find("default")
    assert found
    return found.status()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Receipt]:
    """What `stoker up` leaves, while its service runs. Nothing may be left running afterwards."""
    home = tmp_path_factory.mktemp("home")
    share = round(3 * (1 << 30) / psutil.virtual_memory().total, 3)
    recipe = home / "demo-vllm.toml"
    recipe.write_text(RECIPE.format(model=model, share=share))
    with state_home(home, poll_s=0.5, grace_s=20.0):
        done = stoker("up", str(recipe), "--port", "0", "--json")
        assert done.returncode == 0, done.stderr
        yield read(next((home / "receipts").iterdir()))
        assert stoker("down").returncode == 0
    wait(lambda: not processes_of(home))


def test_it_starts_phase_by_phase_and_passes_the_smoke_test(up: Receipt) -> None:
    smoke = up.smoke
    assert smoke
    assert smoke.tool_call.startswith("get_weather(")
    assert smoke.cached_tokens is not None
    assert smoke.cached_tokens > 0.5 * smoke.long_prompt_tokens
    assert smoke.greedy_text
    assert up.versions["vllm"] == "0.32.0"
    assert {"initializing", "loading weights", "compiling", "starting the API"} <= {each.name for each in up.phases}
    serving = status().serving
    assert serving
    start = read_start(Path(serving.log).read_text().splitlines())
    assert start.cache_tokens
    assert start.seconds("init engine") > 0


def test_it_is_measured(up: Receipt) -> None:
    rows = {row.workload: row for row in up.measured}
    assert {"Q&A", "Code", "JSON-KIE", "general"} <= set(rows)
    assert all(row.failed == 0 and row.decode_tokens_per_s for row in rows.values())


def test_stoker_bench_measures_it(up: Receipt, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    asked = ("--suite", "single", "--workload", "Q&A", "--max-tokens", "32", "--runs", "1", "--json", str(file))
    done = stoker("bench", status().url, *asked)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["workloads"]
    assert (row["completed"], row["failed"]) == (1, 0)
    assert row["decode_tokens_per_s"] > 0


@pytest.fixture(scope="module")
def compared(up: Receipt, model: Path) -> Compared:
    return compare(status().url, up.model_name, model, PROMPTS, TOKENS)


def test_its_greedy_text_is_stokers(compared: Compared) -> None:
    """Where it is not, the two tokens are closer than rounding moves tokens elsewhere."""
    assert PROMPTS - len(compared.partings) >= SAME, "\n".join(map(str, compared.partings))
    assert not compared.unexplained, (compared.allowed, compared.unexplained)


def test_it_is_as_far_from_the_exact_network_as_stoker_is(compared: Compared) -> None:
    """A wrong weight or a wrong operation in either would be further away than rounding is."""
    near, far = sorted((compared.stoker.distance, compared.vllm.distance))
    assert far <= 2 * near
