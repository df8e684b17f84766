"""Packages from npm."""

import shutil
from pathlib import Path

import pytest

from tests.server.clients.downloads import installed_once


def installed(*packages: str) -> Path:
    """A folder whose node_modules has these packages, `name@version` each. Skips where npm cannot be had."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("this needs node and npm, which are not installed here")
    name = packages[0].removeprefix("@").replace("/", "-").replace("@", "-")
    return installed_once(
        name, lambda folder: [[npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", *packages]]
    )
