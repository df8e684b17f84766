"""Installing from a clone with the public package index alone: pins, Python versions, torch builds, advice."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from stoker.cli.extras import install_command

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
LINUX = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31")  # llguidance has wheels for glibc 2.31 and newer
MACOS = ("aarch64-apple-darwin", "x86_64-apple-darwin")


@cache
def environment() -> dict[str, str]:
    """Keeps of pip's and uv's settings only a mirror of the public index: no folders of wheels, no second index."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    asked = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    mirrors = [os.environ.get(name) for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")]
    mirror = next(filter(None, [*mirrors, configured]), None)
    return kept | {"UV_DEFAULT_INDEX": mirror} if mirror else kept


def compile_pins(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """uv's answer with one index and wheels alone."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--quiet", "--python", sys.executable]
    return subprocess.run(
        [*command, "--only-binary", ":all:", "--no-header", "--no-annotate", *arguments],
        cwd=ROOT,
        env=environment(),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_mirror_is_asked_in_place_of_the_public_index_but_no_folder_and_no_second_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_EXTRA_INDEX_URL", "UV_INDEX"):
        monkeypatch.setenv(name, "somewhere")
    asked = {name: value for name, value in environment.__wrapped__().items() if name.startswith(("UV_", "PIP_"))}
    assert asked == {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple"}


@pytest.fixture(scope="module")
def index() -> None:
    probe = compile_pins("-", stdin="pip")
    if probe.returncode:
        pytest.skip(f"no package index can be reached: {probe.stderr}")


def resolve(*targets: tuple[str, str], arguments: tuple[str, ...]) -> dict[tuple[str, str], str]:
    def one(target: tuple[str, str]) -> str:
        platform, python = target
        done = compile_pins("--python-platform", platform, "--python-version", python, *arguments)
        assert done.returncode == 0, f"{platform}, Python {python}: {done.stderr}"
        return done.stdout

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(targets, pool.map(one, targets), strict=True))


@pytest.mark.usefixtures("index")
def test_every_pin_resolves_from_the_public_index_on_linux_and_nothing_but_cuda_is_left_unpinned() -> None:
    extras = ("--extra", "server", "--extra", "dev")
    targets = [(platform, python) for platform in LINUX for python in PYTHONS]
    pins = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text().lower().replace("_", "-"), re.M))
    for target, resolved in resolve(*targets, arguments=("constraints.txt", "pyproject.toml", *extras)).items():
        names = set(re.findall(r"^([\w.-]+)==", resolved, re.M))
        assert pins <= names, target
        assert not {name for name in names - pins if not name.startswith(("nvidia-", "cuda-"))}, target


@pytest.mark.usefixtures("index")
def test_the_base_install_resolves_on_macos_without_torch() -> None:
    targets = [(platform, python) for platform in MACOS for python in (PYTHONS[0], PYTHONS[-1])]
    for resolved in resolve(*targets, arguments=("--constraint", "constraints.txt", "pyproject.toml")).values():
        assert "numpy==" in resolved
        assert "torch==" not in resolved


@pytest.mark.usefixtures("index")
def test_the_second_triton_has_wheels_for_every_python() -> None:
    version = re.search(r"^OTHER_TRITON := (.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert version
    for platform in LINUX:
        for python in (PYTHONS[0], PYTHONS[-1]):
            target = ("--python-platform", platform, "--python-version", python)
            done = compile_pins("-", "--no-deps", *target, stdin=f"triton=={version[1]}")
            assert done.returncode == 0, done.stderr


def test_the_cpu_build_of_torch_satisfies_the_pin() -> None:
    pin = re.search(r"^torch(==(.+))$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pin
    assert SpecifierSet(pin[1]).contains(f"{pin[2]}+cpu")


def test_every_python_that_pins_resolve_for_is_admitted_and_no_other() -> None:
    admitted = SpecifierSet(PROJECT["requires-python"])
    assert [f"3.{minor}" for minor in range(9, 17) if admitted.contains(f"3.{minor}.0")] == list(PYTHONS)
    assert [c.split()[-1] for c in PROJECT["classifiers"] if "Python :: 3." in c] == list(PYTHONS)


FAKE_PYTHON = """#!/bin/sh
# Notes what it is asked for; "venv" makes another of it; the version is FAKE_VERSION; uv fails if FAIL_UV is set.
echo "$@" >> "$FAKE_LOG"
case "$1 $2" in
  "-c "*) exec REAL -c "import sys; sys.version_info = ($FAKE_VERSION, 0, 'final', 0); exec(sys.argv[1])" "$2" ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m uv") [ -z "$FAIL_UV" ] ;;
esac
"""


def set_up(
    folder: Path, target: str, *arguments: str, version: str = "3, 12", fail_uv: str = ""
) -> tuple[int, str, str]:
    """Runs make for a stamp of .venv with a Python that installs nothing; returns status, output and what was asked."""
    fake, log = folder / "python", folder / "log"
    fake.write_text(FAKE_PYTHON.replace("REAL", shlex.quote(sys.executable)))
    fake.chmod(0o755)
    log.touch()
    done = subprocess.run(
        ["make", f"VENV={folder}/venv", f"PYTHON={fake}", f"{folder}/venv/{target}", *arguments],
        cwd=ROOT,
        env=os.environ | {"FAKE_LOG": str(log), "FAKE_VERSION": version, "FAIL_UV": fail_uv},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, log.read_text()


@pytest.mark.parametrize("version", ["3, 11", "3, 12", "3, 13", "3, 14"])
def test_the_demo_is_set_up_without_test_tools(tmp_path: Path, version: str) -> None:
    status, said, asked = set_up(tmp_path, ".installed", "TORCH=cuda", version=version)
    assert status == 0, said
    assert "--editable .[server]\n" in asked
    assert "dev" not in asked
    assert "uv" not in asked
    assert "3 GB" in said
    assert "TORCH=cpu" in said


def test_the_tests_are_set_up_with_their_tools(tmp_path: Path) -> None:
    status, said, asked = set_up(tmp_path, ".ready", "TORCH=cuda")
    assert status == 0, said
    assert asked.endswith("--editable .[server,dev]\n")


@pytest.mark.parametrize("version", ["3, 10", "3, 15"])
def test_another_python_is_refused_before_anything_is_installed(tmp_path: Path, version: str) -> None:
    status, said, asked = set_up(tmp_path, ".installed", version=version)
    assert status != 0
    assert "Stoker needs Python 3.11 to 3.14" in said
    assert "pip" not in asked


def test_torch_for_the_cpu_is_taken_from_where_uv_knows_it(tmp_path: Path) -> None:
    status, said, asked = set_up(tmp_path, ".installed", "TORCH=cpu")
    assert status == 0, said
    asked_uv = [line for line in asked.splitlines() if line.startswith("-m uv")]
    assert [line.split("--torch-backend ")[1] for line in asked_uv] == ["cpu torch --dry-run", "cpu torch"]
    assert "did not serve" not in said


def test_where_torch_for_the_cpu_cannot_be_reached_pip_takes_its_own(tmp_path: Path) -> None:
    status, said, asked = set_up(tmp_path, ".installed", "TORCH=cpu", fail_uv="1")
    assert status == 0, said
    assert asked.count("-m uv") == 1
    assert asked.endswith("--editable .[server]\n")
    assert "did not serve torch for the CPU" in said


def test_an_unknown_build_of_torch_is_refused_by_name(tmp_path: Path) -> None:
    status, said, asked = set_up(tmp_path, ".installed", "TORCH=rocm")
    assert status != 0
    assert "TORCH=rocm is unknown" in said
    assert not asked


def test_advice_to_install_works_from_a_clone() -> None:
    """Stoker is on no package index: `pip install stoker` would fail, or fetch something else of that name."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile"]
    for folder in ("src", "benchmarks", "training"):
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".md", ".html", ".js"}]
    advice = re.compile(
        r"(?:pip|uv|pipx|uvx)\b[^\n]*\b(?:install|run|tool)\b[^\n]*[ \t'\"]stoker(?:\[|['\"\s]|$)", re.M
    )
    found = [f"{path}: {match[0]}" for path in files for match in advice.finditer(path.read_text("utf-8"))]
    assert not found


def test_the_command_for_a_missing_part_names_this_clone_and_this_python() -> None:
    python, *command = shlex.split(install_command("server"))
    assert python == sys.executable
    assert command == ["-m", "pip", "install", "-e", f"{ROOT}[server]"]
