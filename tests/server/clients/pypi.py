"""Packages from PyPI whose requirements would clash with the project's, each in a virtual environment of its own."""

import sys
from pathlib import Path

from tests.server.clients.downloads import installed_once


def interpreter(*packages: str) -> Path:
    """A Python that can import these packages, `name==version` each. Skips where PyPI cannot be reached."""
    name = f"{packages[0].replace('==', '-')}-py{sys.version_info.major}{sys.version_info.minor}"
    folder = installed_once(
        name,
        lambda folder: [
            [sys.executable, "-m", "venv", str(folder)],
            [str(folder / "bin" / "python"), "-m", "pip", "install", *packages],
        ],
    )
    return folder / "bin" / "python"
