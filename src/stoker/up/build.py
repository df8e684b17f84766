"""The build of a recipe: `stoker build` with its options, into a folder that is found again."""

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from stoker.demo import EMBEDDED, NAME
from stoker.errors import StokerError
from stoker.recipes.load import Loaded
from stoker.up.launcher import PR_SET_PDEATHSIG, prctl

SOURCES = ("shared_experts", "mtp", "drafter")  # options that may name a folder


class BuildError(StokerError):
    """A build that failed; what it had done is kept, and the same command goes on."""


def folder(loaded: Loaded, base: Path, revision: str) -> Path:
    """Where the build of a recipe from this base lies: another base or other options have another one."""
    said = [revision or str(base), msgspec.to_builtins(loaded.recipe.build)]
    key = hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache.absolute() / "stoker" / "builds" / f"{loaded.recipe.name}-{key}"


def command(loaded: Loaded, base: Path, out: Path) -> list[str]:
    build = loaded.recipe.build
    assert build
    options = ["--base", str(base)]
    for key, value in msgspec.to_builtins(build).items():
        if value:
            options += [f"--{key.replace('_', '-')}", _source(loaded, key, value)]
    return [sys.executable, "-m", "stoker", "build", *options, "--out", str(out)]


def _source(loaded: Loaded, key: str, value: str) -> str:
    """A folder is meant from the recipe's own."""
    if key not in SOURCES or value.startswith("hf:") or value in ("fp8", NAME):
        return value
    path = loaded.folder / Path(value).expanduser()
    return str(path) if path.is_dir() else value


def is_built(out: Path) -> bool:
    """A build grows beside its folder and is renamed when it is whole."""
    return (out / "stoker.json").is_file()


def run(loaded: Loaded, base: Path, out: Path) -> None:
    """Shows its own progress on stderr. It ends with this process, and goes on the next time."""
    out.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        command(loaded, EMBEDDED if str(base) == NAME else base, out),
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        check=False,
    )
    if done.returncode:
        raise BuildError(f"stoker build ended with exit status {done.returncode}; what it said stands above.")
