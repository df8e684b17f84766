"""Packages that tests use and the project does not depend on, installed once into the user's cache folder."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

PATIENCE_S = 600.0  # for a slow line: an agent is a download of up to 150 MB


def installed_once(name: str, commands: Callable[[Path], list[list[str]]]) -> Path:
    """The folder of that name, which `commands` have filled, now or in an earlier run. Skips where they cannot."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "stoker-tests" / name
    if (folder / "installed").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for command in commands(folder):
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            pytest.skip(f"{name} was not installed within {PATIENCE_S:.0f} s")
        if ran.returncode:
            pytest.skip(f"{name} could not be installed: {(ran.stderr or ran.stdout).strip()[-300:]}")
    (folder / "installed").touch()
    return folder
