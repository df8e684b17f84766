"""The receipt of `stoker up`: what was started, where, from which files, and how fast it was. No secret is in it."""

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

import stoker
from stoker.engines.engine import Launch
from stoker.errors import StokerError
from stoker.up import state
from stoker.up.logs import masking
from stoker.up.measure import Measured
from stoker.up.probe_readings import BoxProbe
from stoker.up.promise import Compared
from stoker.up.smoke import Smoke
from stoker.up.state import PhaseTime

VERSION = 1
LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "huggingface_hub", "vllm", "ray")


class ReceiptError(StokerError):
    """A file that is no receipt, or one that cannot be used as asked."""


class RecipeFacts(Struct, frozen=True):
    name: str
    title: str
    hash: str  # of what it says
    engine: str
    plan: str  # the planner's name of the model
    weights: str
    box: str  # that its promise is about
    draft: str
    users: int
    context: int | None
    kv_dtype: str


class Revision(Struct, frozen=True):
    """Files that were served, or that went into them."""

    what: str  # model, drafter
    source: str
    revision: str  # a commit; empty for a folder
    bytes: int


class Receipt(Struct, frozen=True):
    receipt: int  # version of this format
    date: str
    service: str
    model_name: str  # in the API
    recipe: RecipeFacts
    revisions: tuple[Revision, ...]
    build: str  # the folder that was built; empty: none
    image: str  # of the container, by digest
    versions: dict[str, str]
    launches: tuple[Launch, ...]
    box: str  # the planner's name of this box; empty: it knows none like it
    probe: BoxProbe | None
    phases: tuple[PhaseTime, ...]  # of the engine's start
    start_s: float
    memory_bytes: int  # that the engine took; 0: unknown
    stages: dict[str, float]  # seconds of each of `stoker up`
    smoke: Smoke | None
    greedy_sha256: str  # of the fixed greedy answer
    measured: tuple[Measured, ...]
    expected: tuple[Compared, ...]
    kept: bool | None  # None: nothing was promised for this box
    notes: tuple[str, ...] = ()


def folder() -> Path:
    return state.home() / "receipts"


def write(receipt: Receipt) -> Path:
    """Into the user's state directory, named by recipe and time."""
    path = folder()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise state.unwritable(path, error) from error
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    file = path / f"{receipt.recipe.name}-{stamp}.json"
    state.write_private(file, without_secrets(receipt))
    return file


def without_secrets(data: Any) -> Any:
    """As plain data in which the values of this environment's secrets are replaced, wherever they came from."""
    secrets = masking(os.environ)
    text = msgspec.json.encode(data)
    return msgspec.json.decode(secrets.sub(b"***", text) if secrets else text)


def read(path: Path) -> Receipt:
    try:
        data = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ReceiptError(f"{path} cannot be read: {error.strerror}.") from error
    except msgspec.MsgspecError as error:
        raise ReceiptError(f"{path} is no JSON: {error}.") from error
    if not is_receipt(data):
        raise ReceiptError(f"{path} is no receipt of stoker up.")
    if data["receipt"] != VERSION:
        raise ReceiptError(f"{path} is a receipt of version {data['receipt']}; this stoker reads version {VERSION}.")
    try:
        return msgspec.convert(data, Receipt)
    except msgspec.ValidationError as error:
        raise ReceiptError(f"{path} is not whole: {error}.") from error


def is_receipt(data: Any) -> bool:
    return isinstance(data, dict) and isinstance(data.get("receipt"), int)


def versions(engine: str, engine_version: str) -> dict[str, str]:
    """Of this environment, without importing anything."""
    found = {"stoker": stoker.__version__, "python": platform.python_version(), "kernel": platform.release()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {**found, engine: engine_version}
