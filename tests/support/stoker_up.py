"""`python -m tests.support.stoker_up ...`: the `stoker` command with fake_serve.py as engine, on a made-up box."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

from stoker.cli.main import run
from stoker.engines import stoker
from stoker.up import bring_up
from stoker.up.probe_readings import BoxProbe, Memory, Processor


def probe_box(*_: object, **__: object) -> BoxProbe:
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


if __name__ == "__main__":
    engine = (sys.executable, "-I", "-S", str(Path(__file__).with_name("fake_serve.py")))
    with patch.object(stoker, "RUN", engine), patch.object(bring_up, "probe_box", probe_box):
        run()
