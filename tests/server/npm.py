"""Packages from npm for tests, installed once into the user's cache folder."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PATIENCE_S = 600.0  # for a slow line: an agent is a download of up to 150 MB


def installed(*packages: str) -> Path:
    """A folder whose node_modules has these packages, `name@version` each. Skips where npm cannot be had."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("this needs node and npm, which are not installed here")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "stoker-tests" / packages[0].removeprefix("@").replace("/", "-").replace("@", "-")
    if (folder / "installed").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    command = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", *packages]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not install {packages[0]} within {PATIENCE_S:.0f} s")
    if ran.returncode:
        pytest.skip(f"npm could not install {packages[0]}: {ran.stderr.strip()[-300:]}")
    (folder / "installed").touch()
    return folder
