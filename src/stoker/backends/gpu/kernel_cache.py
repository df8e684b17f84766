"""Where compiled kernels are kept from one start to the next, and which starts have all of theirs there.

Triton finds a kernel by a hash of its source, its constants and the compiler, so the folder outlives upgrades: only
what has changed is compiled again. What lies in it is run, so it must be this user's alone.
"""

import hashlib
import os
import stat
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from stoker.backends.gpu import kernels
from stoker.errors import StokerError

VARIABLE = "TRITON_CACHE_DIR"  # Triton's own: whoever sets it chooses the folder


def kernel_folder() -> Path:
    """Makes Triton keep its kernels in Stoker's folder unless the environment names another. Raises a StokerError if
    others could write to it."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stoker" / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise StokerError(
            f"compiled kernels cannot be kept in {folder}: {error.strerror}. Name another folder in {VARIABLE}."
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise StokerError(
            f"{folder} is not a directory of this user, and compiled kernels are run from it. Remove it, or name "
            f"another folder in {VARIABLE}."
        )
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    os.environ[VARIABLE] = str(folder)
    return folder


def hash_kernels() -> None:
    """Has Triton hash the source of every kernel. What it finds for one depends on those hashed before it, if they
    share functions: only in one order do processes find what others have compiled."""
    from triton.runtime.jit import JITFunction

    for module in sorted(iter_modules(kernels.__path__, f"{kernels.__name__}."), key=lambda each: each.name):
        for _, value in sorted(vars(import_module(module.name)).items()):
            if isinstance(value, JITFunction):
                _ = value.cache_key


def complete(folder: Path, key: str) -> bool:
    """Whether a start of this key has compiled all its kernels before."""
    return _stamp(folder, key).exists()


def mark_complete(folder: Path, key: str) -> None:
    stamp = _stamp(folder, key)
    stamp.parent.mkdir(mode=0o700, exist_ok=True)
    stamp.touch()


def start_key(directory: Path, *settings: object) -> str:
    """Changes with everything that decides which kernels a start needs: the code that launches them, the model's
    configuration and tensors as far as names, sizes and times of files tell, and `settings`."""
    code = sorted(Path(__file__).parents[1].rglob("*.py"))
    configs = sorted(directory.rglob("*.json"))
    weights = [
        (str(file.relative_to(directory)), file.stat().st_size) for file in sorted(directory.rglob("*.safetensors"))
    ]
    variables = sorted(
        (name, value) for name, value in os.environ.items() if name.startswith(("TRITON_", "STOKER_OPS"))
    )
    digest = hashlib.sha256()
    for part in (*_contents([*code, *configs]), repr((weights, variables, settings)).encode()):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def _contents(files: Iterable[Path]) -> Iterable[bytes]:
    return (file.read_bytes() for file in files)


def _stamp(folder: Path, key: str) -> Path:
    return folder / "complete" / key
