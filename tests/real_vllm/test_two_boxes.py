"""A real vLLM on two boxes, which are namespaces of this machine with a cable between them: with Ray and without.

vLLM's CPU build computes with both ranks; the split is over tensors, so that every token takes both boxes.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stoker.engines import vllm_parser
from stoker.engines.engine import find
from stoker.recipes.load import Loaded, parse
from stoker.up.control import Control
from stoker.up.state import Status
from tests.real_vllm.conftest import PATIENCE_S
from tests.support import two_hosts
from tests.support.services import chat, processes_of, state_home
from tests.support.two_hosts import Hosts

WITHIN_S = 10.0  # a failure is told

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(bool(two_hosts.why_not()), reason=f"no namespaces: {two_hosts.why_not()}"),
]


@pytest.fixture(scope="module", params=["vllm", "ray"])
def launcher(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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
    while left := processes_of(tmp_path / "state"):
        assert time.monotonic() < until, f"left running: {[each.cmdline() for each in left]}"
        time.sleep(0.2)


def wait(service: Control, state: str) -> Status:
    until = time.monotonic() + PATIENCE_S
    while True:
        found = service.status()
        instance = found.candidate or found.serving
        assert instance
        if instance.state == state:
            return found
        assert instance.state != "failed", f"{instance.fault}; {Path(instance.log).read_text()[-4000:]}"
        assert time.monotonic() < until, f"it never was {state}: {Path(instance.log).read_text()[-4000:]}"
        time.sleep(0.2)


def engines(home: Path, host: str) -> list[psutil.Process]:
    """Processes that compute on a host."""
    found = []
    for process in processes_of(home):
        try:
            if process.environ().get("STOKER_TEST_HOST") == host and "VLLM::" in (
                process.name() + process.cmdline()[0]
            ):
                found.append(process)
        except (psutil.Error, IndexError):
            pass
    return found


@pytest.mark.parametrize("side", ["a", "b"])
def test_both_boxes_answer_and_the_loss_of_one_is_told_and_leaves_nothing(
    service: Control, model: Path, tmp_path: Path, launcher: str, side: str
) -> None:
    share = round(1.2 * (1 << 30) / psutil.virtual_memory().total, 3)
    text = (
        f'name = "two"\ntitle = "t"\nengine = "vllm"\n[model]\nsource = "{model}"\n'
        f'[serve]\ndevice = "cpu"\nmemory_share = {share}\ncontext = 2048\nusers = 2\narguments = ["--enforce-eager"]\n'
        f'[nodes]\nhosts = ["a", "b"]\nlauncher = "{launcher}"\n'
    )
    wanted = parse(text)
    vllm = find("vllm")
    assert not vllm.problems(wanted)
    made = vllm.deployment(Loaded(wanted, Path(), text), model, None, 0)
    service.apply(type(made)(**{key: getattr(made, key) for key in made.__struct_fields__} | {"restarts": 0}), "beside")
    log = Path(wait(service, "ready").candidate.log)  # type: ignore[union-attr]
    service.accept()
    status, body, _ = chat(service.status().url, model="two", messages=[{"role": "user", "content": "Hi"}])
    assert status == 200, body
    home = tmp_path / "state"
    of_side = engines(home, side)
    assert of_side, f"nothing computes on {side}: {log.read_text()[-4000:]}"
    of_side[0].kill()
    began = time.monotonic()
    while (found := service.status()).state != "failed":
        assert time.monotonic() - began < WITHIN_S, f"the end of {side} was not told: {found}"
        time.sleep(0.05)
    assert found.serving
    assert side in found.serving.fault, found.serving.fault
    print(f"{launcher}: the end of {side} told after {time.monotonic() - began:.1f} s: {found.serving.fault}")
