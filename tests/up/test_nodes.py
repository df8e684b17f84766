"""Two boxes: looked at before anything starts, one engine over both, and whatever breaks is told with its reason.

The boxes are network namespaces with a cable between them and an `ssh` that leads into them; vLLM is a stand-in.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stoker.engines import vllm_parser
from stoker.engines.engine import Deployment, find
from stoker.engines.vllm_parser import VLLM
from stoker.recipes.load import Loaded, parse
from stoker.recipes.recipe import Recipe
from stoker.up import nodes
from stoker.up.control import Control
from tests.support import stand_in_vllm, two_hosts
from tests.support.services import chat, deploy, processes_of, state_home, wait, wait_status
from tests.support.two_hosts import ADDRESSES, INTERFACE, Hosts

WITHIN_S = 10.0  # a failure is told

pytestmark = pytest.mark.skipif(bool(two_hosts.why_not()), reason=f"no namespaces: {two_hosts.why_not()}")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in_vllm.install(tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def hosts(tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    with two_hosts.two_hosts(tmp_path) as found:
        for name in "ab":
            (found.home(name) / "model").mkdir()
            (found.home(name) / "model" / "config.json").write_text("{}")
        monkeypatch.setenv("PATH", f"{found.bin}:{os.environ['PATH']}")
        monkeypatch.setenv(VLLM, str(installed))
        vllm_parser._check.cache_clear()
        yield found


def recipe(more: str = "", launcher: str = "vllm", share: float = 0.01, names: str = '["a", "b"]') -> Recipe:
    return parse(
        f'name = "two"\ntitle = "t"\nengine = "vllm"\n{more}\n[model]\nsource = "model"\n'
        f'[serve]\ndevice = "cpu"\nmemory_share = {share}\n[nodes]\nhosts = {names}\nlauncher = "{launcher}"\n'
    )


def loaded(wanted: Recipe) -> Loaded:
    return Loaded(wanted, Path(), "")


# -- before anything starts


def test_equal_boxes_are_found_equal_and_their_network_is_measured(hosts, installed):
    found = nodes.survey(recipe(), Path("model"), None, str(installed))
    assert found.problems == ()
    a, b = found.boxes
    assert (a.address, b.address, a.interface) == (ADDRESSES["a"], ADDRESSES["b"], INTERFACE)
    assert (a.version, b.version) == ("0.32.0", "0.32.0")
    assert b.link
    assert b.link.gbits > 0.1
    assert found.notes[0].startswith(f"a and b over {INTERFACE}: {b.link.gbits:g} Gb/s by TCP")
    assert found.notes[0].endswith("no RDMA")


def test_a_box_that_cannot_be_reached_is_named_with_what_ssh_said(hosts, installed):
    hosts.change("b", down="connect to host b port 22: No route to host")
    (said,) = nodes.survey(recipe(), None, None, str(installed)).problems
    assert said.startswith("b cannot be reached by ssh: ssh: connect to host b port 22: No route to host.")
    assert "ssh -o BatchMode=yes b true" in said
    (said,) = nodes.survey(recipe(names='["a", "c"]'), None, None, str(installed)).problems
    assert "c cannot be reached by ssh: ssh: Could not resolve hostname c" in said


def test_other_versions_are_named(hosts, tmp_path):
    for name, version in (("a", "0.32.0"), ("b", "0.31.0")):
        stand_in_vllm.install(hosts.home(name) / "env", version=version)
        hosts.change(name, env={"PATH": f"{hosts.home(name) / 'env' / 'bin'}:{os.environ['PATH']}"})
    found = nodes.survey(recipe(), None, None, "")
    assert found.problems == ("vLLM must be the same everywhere: a has 0.32.0 (vllm), b has 0.31.0 (vllm).",)


def test_a_model_that_is_missing_or_differs_is_named(hosts, installed):
    (hosts.home("b") / "model" / "config.json").write_text("{ }")
    (hosts.home("a") / "model" / "tokenizer.json").write_text("{}")
    (said,) = nodes.survey(recipe(), Path("model"), None, str(installed)).problems
    assert said == "the model of b is not that of a: config.json, tokenizer.json differ or are missing."
    for path in (hosts.home("b") / "model").iterdir():
        path.unlink()
    (hosts.home("b") / "model").rmdir()
    (said,) = nodes.survey(recipe(), Path("model"), None, str(installed)).problems
    assert said.startswith("b lacks the model: copy it to the same path as on a")


def test_large_files_are_compared_by_both_ends(hosts, installed):
    for name, last in (("a", b"1"), ("b", b"2")):
        with (hosts.home(name) / "model" / "model.safetensors").open("wb") as file:
            file.truncate(32 << 20)
            file.seek(-1, os.SEEK_END)
            file.write(last)
    (said,) = nodes.survey(recipe(), Path("model"), None, str(installed)).problems
    assert "model.safetensors differ" in said


def test_memory_that_is_not_free_and_networks_that_are_not_there_are_told(hosts, installed):
    found = nodes.survey(recipe(share=1.0), None, None, str(installed)).problems
    assert [said.split()[0] for said in found] == ["a", "b"]
    assert "GiB of its memory free, and vLLM takes 1 of" in found[0]
    wrong = parse(
        'name = "two"\ntitle = "t"\nengine = "vllm"\n[model]\nsource = "m"\n[serve]\nmemory_share = 0.01\n'
        '[nodes]\nhosts = ["a", "b"]\ninterface = "eth7"\n'
    )
    found = nodes.survey(wrong, None, None, str(installed)).problems
    assert found[1] == f"b has no network device eth7; with an address it has: {INTERFACE} ({ADDRESSES['b']})."


def test_a_firewall_between_them_is_found(hosts, installed, monkeypatch):
    measure = nodes._measure

    def cut(head, box):
        down = [hosts.bin / "ssh", "b", "--", f"ip route add blackhole {ADDRESSES['a']}/32"]
        subprocess.run([str(part) for part in down], check=True, stdin=subprocess.DEVNULL)
        return measure(head, box)

    monkeypatch.setattr(nodes, "_measure", cut)
    (said,) = nodes.survey(recipe(), None, None, str(installed)).problems
    assert said.startswith(f"b cannot reach a at {ADDRESSES['a']} ({INTERFACE}): ")
    assert "firewalls" in said


# -- one engine over both


def deployment(**changes) -> Deployment:
    made = find("vllm").deployment(loaded(recipe()), Path("model"), None, 0)
    return Deployment(**{name: getattr(made, name) for name in made.__struct_fields__} | changes)


def test_every_rank_is_told_its_place(hosts, installed):
    assert not find("vllm").problems(recipe())
    first, second = deployment().launches
    assert (first.host, second.host) == ("a", "b")
    shared = ["--tensor-parallel-size 2", "--nnodes 2", f"--master-addr {ADDRESSES['a']}", "--master-port 25000"]
    for rank, launch in enumerate((first, second)):
        command = " ".join(launch.command)
        assert command.startswith(f"{installed} serve model ")
        assert all(each in command for each in [*shared, f"--node-rank {rank}"])
        assert launch.env["VLLM_HOST_IP"] == ADDRESSES["ab"[rank]]
        assert launch.env["GLOO_SOCKET_IFNAME"] == launch.env["NCCL_SOCKET_IFNAME"] == INTERFACE
    assert "--headless" in second.command
    assert "--headless" not in first.command


def test_with_ray_the_first_box_starts_its_head_and_the_others_join(hosts, installed):
    wanted = recipe(launcher="ray")
    (missing, _) = find("vllm").problems(wanted)
    assert missing.startswith("a has no Ray")
    for ray in installed.parent.parent.glob("lib/python*/site-packages"):
        (ray / "ray-2.60.0.dist-info").mkdir()
        (ray / "ray-2.60.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.60.0\n")
    head, worker = find("vllm").deployment(loaded(wanted), Path("model"), None, 0).launches
    assert f"{installed.parent}/ray start --head --port=25000 --node-ip-address={ADDRESSES['a']}" in head.command[2]
    assert head.command[4:6] == (str(installed), "serve")
    assert "--distributed-executor-backend" in head.command
    assert "--nnodes" not in head.command
    assert f"ray start --address={ADDRESSES['a']}:25000 --node-ip-address={ADDRESSES['b']} --block" in worker.command[2]
    assert "SPREAD" in head.env["VLLM_DISTRIBUTED_EXECUTOR_CONFIG"]


@pytest.fixture
def service(tmp_path, hosts):
    with state_home(tmp_path / "state"):
        yield Control.start("default", "127.0.0.1", 0)
    wait(lambda: not processes_of(tmp_path / "state"))


def engines(home: Path, host: str) -> list[psutil.Process]:
    """`vllm serve` on a host."""
    found = []
    for process in processes_of(home):
        try:
            if "serve" in process.cmdline()[2:3] and process.environ().get("STOKER_TEST_HOST") == host:
                found.append(process)
        except psutil.Error:
            pass
    return found


def test_an_engine_over_two_boxes_answers_and_leaves_nothing_behind(service, hosts, tmp_path):
    serving = deploy(service, deployment())
    status, body, _ = chat(service.status().url)
    assert status == 200
    assert b"two two two two" in body
    home = tmp_path / "state"
    assert len(engines(home, "a")) == len(engines(home, "b")) == 1
    assert f"[b] rank 1 waits for {ADDRESSES['a']}:25000" in Path(serving.log).read_text()
    service.stop()
    assert not engines(home, "a")
    assert not engines(home, "b")


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_rank_that_dies_is_told_with_its_box_and_the_other_is_ended(service, tmp_path, side):
    deploy(service, deployment(restarts=0))
    home = tmp_path / "state"
    (engine,) = engines(home, side)
    engine.kill()
    began = time.monotonic()
    found = wait_status(service, lambda status: status.state == "failed")
    assert time.monotonic() - began < WITHIN_S
    assert f"the engine process on {side} was killed by SIGKILL" in found.serving.fault
    wait(lambda: not engines(home, "a") and not engines(home, "b"))


def test_a_box_that_is_lost_is_told_and_its_engine_ends_by_itself(service, tmp_path):
    deploy(service, deployment(restarts=0))
    home = tmp_path / "state"
    (connection,) = [
        each
        for each in processes_of(home)
        if "ssh_shim.py" in " ".join(each.cmdline()) and " b " in " ".join(each.cmdline())
    ]
    connection.terminate()  # it ends with 255, as ssh does 6 s after a cable is pulled
    began = time.monotonic()
    found = wait_status(service, lambda status: status.state == "failed")
    assert time.monotonic() - began < WITHIN_S
    assert "the connection to b by ssh failed or was lost" in found.serving.fault
    wait(lambda: not engines(home, "b"))


def test_both_start_again_after_a_fault(service, tmp_path):
    deploy(service, deployment())
    home = tmp_path / "state"
    engines(home, "b")[0].kill()
    wait_status(service, lambda status: status.state == "serving" and status.serving.restarts == 1)
    wait(lambda: len(engines(home, "a")) == len(engines(home, "b")) == 1)
    assert chat(service.status().url)[0] == 200
