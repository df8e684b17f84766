"""Every command of the README and the guides is run, in the order in which a reader types them.

Each is of exactly one class, which says how it is run here; a command of no class fails. `make test` has a stand-in for
the engine behind `stoker up`, so that a service is there in seconds; `make test-all` runs the embedded model.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import typer

from stoker.cli.main import app
from stoker.engines.vllm_parser import VLLM
from stoker.up.control import status
from stoker.up.systemd import unit_name
from tests.agents.agents import AGENTS
from tests.guides.blocks import DOCUMENTS, ROOT, Command, commands, spans
from tests.guides.hubs import hubs
from tests.support import situations, stand_in_vllm
from tests.support.random_checkpoint import small_drafter_config, write_random_drafter
from tests.support.services import state_home
from tests.test_packaging import compile_pins

PATIENCE_S = 900.0
LONG_S = 2400.0  # a page measures the embedded model and checks it twice
ADDRESSES = re.compile(r"http://(?:127\.0\.0\.1:(?:8000|8001|8080)|other:8000)")
REPOSITORIES = {
    "Intel/Qwen3.5-122B-A10B-int4-AutoRound": situations.intel_int4,
    "Qwen/Qwen3.5-122B-A10B-FP8": situations.qwen_fp8,
    "z-lab/Qwen3.5-122B-A10B-DFlash": lambda folder: write_random_drafter(
        folder, small_drafter_config(situations.config_of(vision=False))
    ),
}
STAND_INS = ("sudo", "docker", "systemctl", "journalctl", "nvidia-smi", "prometheus", "promtool")
QUICK_BENCH = "--workload Q\\&A --runs 1 --max-tokens 16"
QUICK_CHECK = "--items 1 --fresh"
SMALL_MODEL = "--no-self-test --context 4k --device cpu"


@dataclass(frozen=True)
class Class:
    """How commands that match `pattern` are run: `as_run` makes the line of bash; `quick`: with the stand-in engine."""

    pattern: str
    as_run: Callable[[str, bool], str]
    why: str


def _as_it_is(text: str, quick: bool) -> str:
    return text


def _measured(text: str, quick: bool) -> str:
    """The suites take minutes: a part of one with the stand-in. What the run wrote is what reports are read from."""
    short = QUICK_CHECK if text.startswith("stoker check") else QUICK_BENCH
    ran = f"{text} {short}" if quick else text
    return f"{ran}; cp result.json before.json; cp result.json after.json" if "--json result.json" in text else ran


def _planned(text: str, quick: bool) -> str:
    """What `stoker up` would do, for a reader's box."""
    more = [option for option in ("--dry-run", "--box spark") if option.split()[0] not in text]
    line = " ".join([text, *more])
    if "mine.toml" in text:  # the boxes that it names are looked at, and no box of that name can be reached
        return f"{line} >plan.txt || grep -q 'spark-a cannot be reached by ssh' plan.txt"
    return line


def _served(text: str, quick: bool) -> str:
    """Started until it answers, then ended; with the stand-in only the options are read."""
    more = SMALL_MODEL if "models/" in text else ""
    return "true" if quick else f"python3 -m tests.guides.serve_once {text.removeprefix('stoker serve ')} {more}"


def _cloned(text: str, quick: bool) -> str:
    if text.startswith("git pull"):
        return "true"
    return f"git clone --quiet --no-hardlinks --depth 1 file://{shlex.quote(str(ROOT))} stoker"


def _venv(text: str, quick: bool) -> str:
    return f"{text} --without-pip && ln -s $(command -v stoker) .venv/bin/stoker"


CLASSES = {
    "as it is": Class(
        r"stoker (--version|plan|pick|evidence|list|status|logs|down|report|probe|generate)\b"
        r"|curl |export \w+=|cd stoker$|\. \.venv/bin/activate$|mkdir |cp |sed -i |install -m |echo ",
        _as_it_is,
        "nothing has to be replaced but the address",
    ),
    "measuring": Class(r"stoker (bench|check) http", _measured, "the service that runs here is measured"),
    "dry run": Class(
        r"stoker up ",
        _planned,
        "it would download 78 GB; tests/up runs it with stand-ins and with the embedded model",
    ),
    "from a hub": Class(
        r"hf download |stoker (inspect|build --base) models/",
        _as_it_is,
        "a stand-in serves miniatures of these",
    ),
    "a server": Class(r"stoker serve ", _served, "it would run until it is ended"),
    "a virtual environment": Class(r"python3 -m venv \.venv$", _venv, "this test's commands are put into it"),
    "installing": Class(
        r"(\.venv/bin/)?pip install ", lambda text, quick: "true", "resolved from the package index instead, see below"
    ),
    "a clone": Class(r"git clone ADDRESS-OF-THIS-REPOSITORY stoker$|git pull --ff-only$", _cloned, "of this checkout"),
    "make": Class(
        r"make ",
        lambda text, quick: (
            f"make --directory {shlex.quote(str(ROOT))} --dry-run {text.removeprefix('make ')} >make.txt"
        ),
        "make says what it would do; tests of the demo and the box report run what that is",
    ),
    "an agent": Class(
        rf"({'|'.join(agent.first[0] for agent in AGENTS.values())})$", _as_it_is, "tests/agents runs the real ones"
    ),
    "the system": Class(rf"({'|'.join(STAND_INS)})\b", _as_it_is, "a stand-in notes what it was asked for"),
    "another machine": Class(r"ssh ", lambda text, quick: f"{text} || test $? = 255", "there is none: ssh says so"),
}


def class_of(command: Command) -> str:
    found = [name for name, kind in CLASSES.items() if re.match(kind.pattern, command.text)]
    assert len(found) == 1, f"{command.document}: {command.text!r} is of {found or 'no class'}; see CLASSES"
    return found[0]


@dataclass(frozen=True)
class Place:
    """Where commands are run."""

    home: Path
    url: str
    quick: bool
    environment: dict[str, str]
    again: str  # starts the service at its address once a reader has ended it


@contextmanager
def place(root: Path, quick: bool) -> Iterator[Place]:
    """A home folder with a running service, programs of the system that only take notes, and a hub."""
    home, programs = root / "home", root / "programs"
    for folder in (home, programs):
        folder.mkdir()
    module = "tests.support.stoker_up" if quick else "stoker"
    python = shlex.quote(sys.executable)
    write_program(programs / "stoker", f'exec {python} -m {module} "$@"')
    write_program(programs / "python3", f'exec {python} "$@"')
    write_program(programs / "hf", f'exec {python} -c "from huggingface_hub.cli.hf import main; main()" "$@"')
    write_program(programs / "ssh", "echo 'no such host' >&2; exit 255")
    for name in (*STAND_INS, *(agent.first[0] for agent in AGENTS.values())):
        write_program(programs / name, f'echo "{name} $*" >> {shlex.quote(str(root / "asked.txt"))}')
    with hubs(root / "hub", REPOSITORIES) as endpoint, state_home(home / ".local" / "state" / "stoker"):
        environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(home),
            "USER": "reader",
            "XDG_CACHE_HOME": str(home / ".cache"),
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "HF_ENDPOINT": endpoint,
            VLLM: str(stand_in_vllm.install(root / "vllm")),
            "HF_HOME": str(home / ".cache" / "huggingface"),
        }
        for name in ("HF_HUB_OFFLINE", "XDG_STATE_HOME", "STOKER_API_KEY"):
            environment.pop(name, None)
        more = (
            ("--box", "spark") if quick else ("--no-measure",)
        )  # a made-up box has what it takes, whatever else runs here
        up = ["stoker", "up", "demo", "--port", "0", *more]
        started = subprocess.run(up, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert started.returncode in (0, 1), started.stderr  # 1: a busy machine is slower than was promised
        found = status("default")
        assert found is not None
        port = found.url.rpartition(":")[2]
        again = shlex.join(["env", "-u", "STOKER_API_KEY", "stoker", "up", "demo", "--port", port, *more])
        yield Place(home, found.url, quick, environment, f"{again} || test $? = 1")


def write_program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/bash\n{line}\n")
    path.chmod(0o755)


@pytest.fixture(scope="module", params=["stand-in", pytest.param("embedded model", marks=pytest.mark.long)])
def here(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place(tmp_path_factory.mktemp("guides"), request.param == "stand-in") as found:
        yield found


def test_every_command_is_of_exactly_one_class() -> None:
    found = [class_of(command) for document in DOCUMENTS for command in commands(document)]
    assert set(found) == set(CLASSES), "a class without commands can go"
    assert len(found) > 60


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if commands(path)], ids=lambda path: path.name)
def test_commands_run_in_the_order_in_which_they_stand(here: Place, document: Path, tmp_path: Path) -> None:
    lines = ["set -eE", "trap 'echo \"failed: $doing\" >&2' ERR"]
    ended = False
    for command in commands(document):
        text = CLASSES[class_of(command)].as_run(ADDRESSES.sub(here.url, command.text), here.quick)
        lines += [f"doing={shlex.quote(command.text)}", 'echo "\n$ $doing"', text]
        if command.text == "stoker down":
            ended = True
        elif ended and command.text.startswith("stoker up "):  # a dry run here
            lines.append(here.again)
            ended = False
    if ended:
        lines.append(here.again)
    if not any(command.text.startswith("git clone") for command in commands(document)):
        for name in ("src", "docs"):  # such pages are read in a clone
            (tmp_path / name).symlink_to(ROOT / name)
        (tmp_path / "stoker").mkdir()
    ran = subprocess.run(
        ["bash", "-c", "\n".join(lines)], cwd=tmp_path, env=here.environment, capture_output=True, text=True,
        timeout=PATIENCE_S if here.quick else LONG_S,
    )  # fmt: skip
    assert ran.returncode == 0, f"{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}"
    assert "Traceback" not in ran.stderr, ran.stderr[-4000:]
    if document.name == "README.md":
        assert "\n56\n" in ran.stdout, "stoker generate --chat answers the sum"
        assert "think>" not in ran.stdout + ran.stderr
    if document.name == "dgx-spark.md":
        assert ran.stdout.count("Usable, MTP drafting included.") == 2


@cache
def resolved(extra: str, name: str) -> None:
    arguments = ("--constraint", "constraints.txt", "pyproject.toml", *(("--extra", extra) if extra else ()))
    done = compile_pins("-", stdin=name) if name else compile_pins(*arguments)
    assert done.returncode == 0, done.stderr


def test_what_is_installed_resolves_from_the_public_index() -> None:
    if (probe := compile_pins("-", stdin="pip")).returncode:
        pytest.skip(f"no package index can be reached: {probe.stderr}")
    lines = {c.text for document in DOCUMENTS for c in commands(document) if class_of(c) == "installing"}
    for line in lines:
        match = re.fullmatch(
            r"(?:\.venv/bin/)?pip install (?:(?:--constraint constraints\.txt )?-e (?:'\.\[(\w+)\]'|\.)|([\w-]+))", line
        )
        assert match, line
        resolved(match[1] or "", match[2] or "")


def test_units_images_and_files_that_commands_of_the_system_name_exist() -> None:
    texts = [c.text for document in DOCUMENTS for c in commands(document) if class_of(c) == "the system"]
    units = {unit for text in texts for unit in re.findall(r"\S+\.service", text)}
    assert units == {unit_name("default")}
    for text in texts:
        for name in re.findall(r"(?:-f|config) (\S+)", text):
            assert (ROOT / name).exists(), text
    tags = {tag for text in texts for tag in re.findall(r"build .*-t (\S+)", text)}
    run = {text.split(" stoker ")[1] for text in texts if text.startswith("docker run") and " stoker " in text}
    assert tags == {"stoker"}
    for line in run:
        known_options(f"stoker {line}")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_within_sentences_have_the_options_they_are_shown_with(document: Path) -> None:
    for span in spans(document):
        known_options(span)
    for command in commands(document):
        if command.text.startswith("stoker "):
            known_options(command.text)


def known_options(line: str) -> None:
    """Raises if there is no such command, or an option of it is unknown."""
    words = shlex.split(line)[1:]
    group = typer.main.get_command(app)
    context = typer.Context(group, info_name="stoker")
    command = group
    while words and not words[0].startswith("-") and hasattr(command, "get_command"):
        found = command.get_command(context, words[0])
        assert found is not None, f"{line}: no command {words[0]}"
        command, words = found, words[1:]
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    options |= {"--help", "--debug"}
    unknown = [word for word in words if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in options]
    assert not unknown, f"{line}: no such option: {unknown}"
