"""What `stoker up` has done for a service, in its folder: the same command goes on from there, and repeats nothing."""

from pathlib import Path

import msgspec
from msgspec import Struct

from stoker.engines.engine import Deployment
from stoker.up import state
from stoker.up.measure import Measured
from stoker.up.probe_readings import BoxProbe
from stoker.up.smoke import Smoke

FILE = "up.json"


class Journal(Struct):
    """Of one recipe on one service. Another recipe, or another deployment of it, begins anew."""

    recipe_hash: str
    stage: str = ""  # the latest that began
    seconds: dict[str, float] = {}  # by stage that is over
    probe: BoxProbe | None = None
    box: str = ""  # that was asked for
    shell: list[str] = []  # hashes of steps that have run before this start
    deployment: Deployment | None = None
    log: str = ""  # of the engine that the rest is about: a new start has a new one
    free_before: int = 0  # bytes, before that engine was started
    memory_bytes: int = 0  # that it took; 0: unknown
    smoke: Smoke | None = None
    measured: list[Measured] = []
    receipt: str = ""  # file


def path_of(name: str) -> Path:
    return state.folder(name) / FILE


def load(name: str, recipe_hash: str) -> Journal:
    """A journal that cannot be read, or is of another recipe, is begun anew."""
    try:
        found = msgspec.json.decode(path_of(name).read_bytes(), type=Journal)
    except (OSError, msgspec.MsgspecError):
        return Journal(recipe_hash)
    return found if found.recipe_hash == recipe_hash else Journal(recipe_hash)


def save(name: str, journal: Journal) -> None:
    state.write_private(path_of(name), journal)
