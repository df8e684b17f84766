"""Commands that need an optional part of the install say so, with the line that installs it."""

from importlib.util import find_spec

from stoker.errors import DependencyError


def need_engine() -> None:
    missing = [name for name in ("torch", "safetensors", "tokenizers", "transformers") if find_spec(name) is None]
    if missing:
        raise DependencyError(
            f"this command needs {', '.join(missing)}, which the base install leaves out; "
            "install them with: pip install 'stoker[engine]'"
        )
