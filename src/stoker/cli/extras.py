"""Commands that need an optional part of the install say so, with the line that installs it."""

from collections.abc import Sequence
from importlib.util import find_spec

from stoker.errors import DependencyError

ENGINE = ("torch", "safetensors", "tokenizers", "transformers")
SERVER = (*ENGINE, "fastapi", "llguidance", "prometheus_client", "uvicorn")


def need_engine() -> None:
    _need(ENGINE, "engine")


def need_server() -> None:
    _need(SERVER, "server")


def _need(names: Sequence[str], extra: str) -> None:
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise DependencyError(
            f"this command needs {', '.join(missing)}, which the base install leaves out; "
            f"install them with: pip install 'stoker[{extra}]'"
        )
