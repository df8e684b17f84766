"""Where a model runs: `--device` as asked for, and what torch says there is."""

from collections.abc import Callable
from ctypes import CDLL
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

from stoker.errors import RequestError

OLDEST = (8, 0)  # compute capability: bf16 products, which every kernel makes, came with it
AUTO = "auto"


@dataclass(frozen=True)
class Accelerator:
    """What torch says of a GPU, or why there is none for it."""

    torch: str  # its version
    reason: str = ""  # a clause, such as "no driver was found": it cannot be used, and this is why
    name: str = ""
    capability: tuple[int, int] | None = None  # None: AMD's, which have none
    memory: int = 0  # bytes
    unified: bool = False  # the memory is the host's


@dataclass(frozen=True)
class Chosen:
    device: str  # torch's name for it
    said: str  # what the user is told


def choose_device(asked: str, look: Callable[[str], Accelerator] | None = None) -> Chosen:
    """For `auto` a GPU if one can be used, else the CPU. Raises a RequestError with the reason for a GPU that was asked
    for and cannot be used. `look` says what there is of a device."""
    look = look or look_at
    if asked == AUTO:
        found = look("cuda")
        reason = _unusable(found)
        return Chosen("cpu", f"Running on the CPU: {reason}.") if reason else Chosen("cuda", _said("cuda", found))
    kind, _, number = asked.partition(":")
    if kind not in ("cpu", "cuda") or (":" in asked and not number.isdecimal()):
        raise RequestError(f"--device {asked} is no device that models run on: write auto, cpu, cuda or cuda:0.")
    if kind == "cpu":
        return Chosen("cpu", "Running on the CPU, as asked for.")
    found = look(asked)
    if reason := _unusable(found):
        raise RequestError(f"--device {asked} cannot be used: {reason}. Leave it out, or write --device cpu.")
    return Chosen(asked, _said(asked, found))


def look_at(device: str) -> Accelerator:
    """What torch says. It takes a second or two to import, which is saved where it could not find a GPU."""
    made = _torch_version()
    version = str(made["__version__"])
    if made.get("hip") is None:
        if made.get("cuda") is None:
            return Accelerator(version, f"the torch that is installed ({version}) was built without CUDA")
        if not _has_nvidia_driver():
            return Accelerator(version, "no NVIDIA driver was found (`nvidia-smi` shows what there is)")
    import torch

    try:
        torch.cuda.init()
        found = torch.cuda.get_device_properties(device)
    except (RuntimeError, AssertionError) as error:  # no driver, one that is too old, no such card
        reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
        return Accelerator(version, f"CUDA says: {reason} (`nvidia-smi` shows what there is)")
    capability = None if torch.version.hip else (found.major, found.minor)
    unified = bool(getattr(found, "is_integrated", False))
    return Accelerator(version, "", found.name, capability, found.total_memory, unified)


def _torch_version() -> dict[str, Any]:
    """What torch's own small file says of the version that is installed, and of what it was built for."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    return run_path(str(Path(found.origin).with_name("version.py")))


def _has_nvidia_driver() -> bool:
    """Whether the driver's library is where torch would load it from."""
    try:
        CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _unusable(found: Accelerator) -> str:
    """A clause, or nothing."""
    if found.reason:
        return found.reason
    if found.capability and found.capability < OLDEST:
        have, need = (".".join(map(str, version)) for version in (found.capability, OLDEST))
        return f"{found.name} has compute capability {have}, and the kernels need {need} or later"
    return ""


def _said(device: str, found: Accelerator) -> str:
    shared = ", shared with the host" if found.unified else ""
    return f"Running on {device}: {found.name}, {found.memory / 2**30:.1f} GiB{shared}."
