"""A real vLLM on two boxes, which are namespaces of this machine with a cable between them: with Ray and without."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from stoker.engines import vllm_parser
from stoker.engines.engine import find
from stoker.recipes.load import Loaded, parse
from stoker.up.control import Control
from stoker.up.state import Instance
from tests.real_vllm.conftest import PATIENCE_S
from tests.support import two_hosts
from tests.support.services import ask, processes_of, state_home
from tests.support.two_hosts import Hosts

WITHIN_S = 10.0  # a failure is told

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(bool(two_hosts.why_not()), reason=f"no namespaces: {two_hosts.why_not()}"),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts.two_hosts(tmp_path_factory.mktemp("hosts")) as found, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{found.bin}:{os.environ['PATH']}")
        vllm_parser._check.cache_clear()
        yield found


@pytest.fixture
def service(tmp_path: Path, hosts: Hosts) -> Iterator[Control]:
    with state_home(tmp_path / "state", poll_s=0.5, grace_s=20.0):
        yield Control.start("default", "127.0.0.1", 0)
    until = time.monotonic() + 60
    while left := [*processes_of(tmp_path / "state"), *hosts.processes("a"), *hosts.processes("b")]:
        assert time.monotonic() < until, f"left running: {[each.cmdline() for each in left]}"
        time.sleep(0.2)


def apply(service: Control, model: Path, launcher: str) -> None:
    share = round(1.2 * (1 << 30) / psutil.virtual_memory().total, 3)
    text = (
        f'name = "two"\ntitle = "t"\nengine = "vllm"\n[model]\nsource = "{model}"\n'
        f'[serve]\ndevice = "cpu"\nmemory_share = {share}\ncontext = 2048\nusers = 2\narguments = ["--enforce-eager"]\n'
        f'[nodes]\nhosts = ["a", "b"]\nlauncher = "{launcher}"\n'
    )
    recipe, vllm = parse(text), find("vllm")
    assert not vllm.problems(recipe)
    made = vllm.deployment(Loaded(recipe, Path(), text), model, None, 0)
    service.apply(msgspec.structs.replace(made, restarts=0), "beside")


def wait(service: Control, condition: Callable[[Instance], object]) -> Instance:
    until = time.monotonic() + PATIENCE_S
    while True:
        found = service.status()
        instance = found.candidate or found.serving
        assert instance
        if condition(instance):
            return instance
        log = Path(instance.log).read_text()[-4000:]
        assert instance.state != "failed", f"{instance.fault}; {log}"
        assert time.monotonic() < until, f"it never came to that: {log}"
        time.sleep(0.1)


def failed(service: Control, side: str) -> Instance:
    """Told within WITHIN_S, with the box."""
    began = time.monotonic()
    while (found := service.status()).state != "failed":
        assert time.monotonic() - began < WITHIN_S, f"the end of {side} was not told: {found}"
        time.sleep(0.05)
    instance = found.candidate or found.serving
    assert instance
    print(f"the end of {side} was told after {time.monotonic() - began:.1f} s: {instance.fault}")
    assert f" {side} " in instance.fault or f"[{side}]" in instance.fault, instance.fault
    return instance


def processes(hosts: Hosts, name: str, word: str) -> list[psutil.Process]:
    """Of a host, whose name or command has a word in it."""
    found = []
    for process in hosts.processes(name):
        with suppress(psutil.Error):
            found += [process] if word in " ".join((process.name(), *process.cmdline())) else []
    return found


@pytest.mark.parametrize("side", ["a", "b"])
def test_both_boxes_answer_and_the_loss_of_one_is_told_and_leaves_nothing(
    service: Control, hosts: Hosts, model: Path, side: str
) -> None:
    """Without Ray: vLLM's own multi-node flags."""
    apply(service, model, "vllm")
    log = Path(wait(service, lambda instance: instance.state == "ready").log)
    service.accept()
    asked = {"model": "two", "messages": [{"role": "user", "content": "Name a day."}], "max_tokens": 16}
    status, body, _ = ask(f"{service.status().url}/v1/chat/completions", asked, {"Content-Type": "application/json"})
    assert status == 200, body
    workers = processes(hosts, side, "VLLM::Worker")
    assert workers, f"nothing computes on {side}: {log.read_text()[-4000:]}"
    workers[0].kill()
    failed(service, side)


def test_ray_joins_both_boxes_and_vllm_says_that_a_cpu_does_not_support_it(service: Control, model: Path) -> None:
    """Real Ray, and as far as the CPU build goes: vLLM starts once both boxes have joined, and stops at this."""
    apply(service, model, "ray")
    instance = wait(service, lambda instance: instance.state == "failed")
    log = Path(instance.log).read_text()
    assert "Ray runtime started" in log
    assert "current platform cpu does not support ray" in log, f"{instance.fault}; {log[-4000:]}"
    print(instance.fault)


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_ray_that_ends_is_told_and_leaves_nothing(service: Control, hosts: Hosts, model: Path, side: str) -> None:
    apply(service, model, "ray")
    wait(service, lambda _: processes(hosts, "a", "vllm serve") and processes(hosts, "b", "raylet"))
    if side == "a":
        for process in processes(hosts, "a", "vllm serve"):
            process.kill()
    else:
        for process in processes(hosts, "b", "raylet/raylet"):
            process.kill()
    failed(service, side)
