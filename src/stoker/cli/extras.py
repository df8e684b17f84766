"""What commands share that run a model: the option for the device, and checks that what they need is installed."""

import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import stoker
from stoker.errors import DependencyError

ENGINE = ("torch", "huggingface_hub", "tokenizers", "transformers")
SERVER = (*ENGINE, "fastapi", "llguidance", "prometheus_client", "uvicorn")


DEVICES = "Where the model runs: auto (a GPU if one can be used, else the CPU), cpu, cuda, cuda:0 ..."


def need_engine() -> None:
    _need(ENGINE, "engine")


def need_server() -> None:
    _need(SERVER, "server")


def _need(names: Sequence[str], extra: str) -> None:
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise DependencyError(
            f"this command needs {', '.join(missing)}, which the base install leaves out; "
            f"install them with: {install_command(extra)}"
        )


def install_command(extra: str) -> str:
    """The command that installs an extra. Stoker is not on a package index, so it refers to a clone."""
    clone = Path(stoker.__file__).parents[2]
    if (clone / "pyproject.toml").is_file():
        return f"{shlex.quote(sys.executable)} -m pip install -e {shlex.quote(f'{clone}[{extra}]')}"
    return f"pip install -e '.[{extra}]' in a clone of Stoker"
