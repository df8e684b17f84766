"""`python -m tests.support.stoker_up ...`: the `stoker` command with fake_serve.py as engine, on a made-up box.

STOKER_TEST_HOLD names a stage at whose beginning the command stops (SIGSTOP), so that a test may kill it just there.
STOKER_TEST_PROBES and STOKER_TEST_BUILDS are files that get a line for every probe and every build; with the latter, a
build copies the embedded model.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

import psutil

from stoker.cli.main import run
from stoker.engines import stoker
from stoker.up import bring_up, build
from stoker.up.probe_readings import BoxProbe, Memory, Processor


def probe_box(*_: object, **__: object) -> BoxProbe:
    if file := os.environ.get("STOKER_TEST_PROBES"):
        with open(file, "a") as probes:
            probes.write("probe\n")
    memory = Memory(total=16 << 30, available=8 << 30, locked=0, swap_total=0, swap_used=0, unified=False)
    return BoxProbe(
        version="0",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=0.0,
        processor=Processor("made up", "x86_64", 2, 2, 0.0),
        memory=memory,
        cards=(),
        speeds=(),
        disk=None,
        published=None,
    )


BUILD = """import os, pathlib, shutil, sys
_, base, out, told = sys.argv
with open(told, "a") as builds:
    builds.write("build\\n")
shutil.copytree(base, f"{out}.part", dirs_exist_ok=True)
pathlib.Path(f"{out}.part", "stoker.json").write_text("{}")
os.rename(f"{out}.part", out)
"""


def build_command(loaded: object, base: Path, out: Path) -> list[str]:
    return [sys.executable, "-c", BUILD, str(base), str(out), os.environ["STOKER_TEST_BUILDS"]]


def made_up_memory() -> AbstractContextManager[object]:
    """16 GiB, of which 12 are available."""
    memory = psutil.virtual_memory()._replace(total=16 << 30, available=12 << 30)
    return patch.object(psutil, "virtual_memory", lambda: memory)


stage = bring_up.Up._stage


@contextmanager
def held(up: bring_up.Up, name: str) -> Iterator[None]:
    with stage(up, name):
        if name == os.environ.get("STOKER_TEST_HOLD"):
            os.kill(os.getpid(), signal.SIGSTOP)
        yield


if __name__ == "__main__":
    engine = (sys.executable, "-I", "-S", str(Path(__file__).with_name("fake_serve.py")))
    if "STOKER_TEST_BUILDS" in os.environ:
        build.command = build_command
    # Other programs on this machine leave less or more, and that must decide nothing here.
    with (
        made_up_memory(),
        patch.object(stoker, "RUN", engine),
        patch.object(bring_up, "probe_box", probe_box),
        patch.object(bring_up.Up, "_stage", held),
    ):
        run()
