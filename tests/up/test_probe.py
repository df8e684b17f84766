"""`stoker probe` on this machine: what it measures, what it says where something is missing; nothing is left behind."""

import json
import sys
from pathlib import Path

import msgspec
import pynvml
import pytest
from typer.testing import CliRunner

from stoker.cards import Card, CardReading
from stoker.cli.main import app
from stoker.cli.probe import lines
from stoker.errors import RequestError
from stoker.up import bandwidth, disk_speed
from stoker.up.probe import probe_box
from stoker.up.probe_readings import BoxProbe

MB = 1 << 20
QUIET = CardReading(8.0, 140.0, 140.0, 40, 208, 3003, None, 0, ())
BUSY = CardReading(38.0, 140.0, 140.0, 61, 2405, 3003, 8000, 96, ("its power limit",))


@pytest.fixture(autouse=True)
def _small(tmp_path, monkeypatch):
    """Matrices, files and times of a test's size; the process is a real one."""
    text = Path(bandwidth.__file__).read_text().replace("SECONDS, ROUNDS = 0.6, 5", "SECONDS, ROUNDS = 0.3, 3")
    copy = tmp_path / "bandwidth.py"
    copy.write_text(text.replace("LEAST = 512 << 20, 32 << 20", "LEAST = 8 << 20, 8 << 20"))
    assert copy.read_text() != Path(bandwidth.__file__).read_text()
    monkeypatch.setattr(bandwidth, "__file__", str(copy))
    monkeypatch.setattr(disk_speed, "WRITTEN", 32 * MB)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()


@pytest.fixture
def without_torch(tmp_path) -> str:
    """A Python that has no torch."""
    program = "import sys; sys.modules['torch'] = None; text = sys.argv[1]; del sys.argv[1]; exec(text)"
    file = tmp_path / "python"
    file.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -c "{program}" "$@"\n')
    file.chmod(0o755)
    return str(file)


class FakeCard(Card):
    """Idle until weights are read."""

    def read(self) -> CardReading:
        self.handle.append(None)
        return BUSY if len(self.handle) > 1 else QUIET


def test_this_machine(without_torch, tmp_path):
    told: list[str] = []
    found = probe_box(python=without_torch, told=told.append)
    assert found.processor.name
    assert found.processor.threads >= 1
    assert found.memory.total >= found.memory.available > 0
    (speed,) = found.speeds
    assert (speed.device, speed.library, speed.matrix_bytes) == ("cpu", "numpy", 8 * MB)
    assert 0.05 < speed.gemv_gb_s < 10_000
    assert 0.05 < speed.copy_gb_s < 10_000
    assert found.disk
    assert found.disk.read_gb_s > 0
    assert found.disk.bytes == 32 * MB
    assert found.published is None
    assert any("name it, as in --box spark" in each.text for each in found.findings)
    assert told == [
        *("cards and memory", "starting a process that measures memory"),
        *("copying memory on cpu", "reading weights on cpu", "the disk"),
    ]
    assert list((tmp_path / "home").iterdir()) == []
    assert msgspec.json.decode(msgspec.json.encode(found), type=BoxProbe) == found


def test_torch_measures_where_there_is_one():
    (speed,) = probe_box().speeds
    assert (speed.device, speed.library) == ("cpu", "torch")
    assert 0.05 < speed.gemv_gb_s < 10_000


def test_a_card_that_this_python_cannot_use_is_said_and_its_idle_power_is_not_judged(without_torch, monkeypatch):
    monkeypatch.setattr("stoker.up.probe.nvidia_cards", lambda: [Card("NVIDIA GB10", 0, 0)])
    monkeypatch.setattr(Card, "read", lambda self: QUIET)
    found = probe_box(python=without_torch, model=None)
    assert found.problems == (f"only the processor's memory was measured, since {without_torch} has no torch",)
    (card,) = found.cards
    assert (card.watts, card.clock_mhz, card.highest_clock_mhz, card.temperature_c) == (None, None, 3003, 40)
    assert found.published
    assert found.published.box == "spark"
    assert not [each for each in found.findings if each.text.startswith("NVIDIA GB10")]


def test_a_card_is_read_while_weights_are(tmp_path, monkeypatch):
    """The process is a stand-in for one with a GPU."""
    program = """
import json, time
print("a module says hello")
print(json.dumps({"phase": "copy", "device": "cuda:0"}), flush=True)
print(json.dumps({"phase": "gemv", "device": "cuda:0"}), flush=True)
time.sleep(0.6)
print(json.dumps({"phase": "done", "device": "cuda:0"}), flush=True)
device = {"device": "cuda:0", "name": "NVIDIA GB10", "architecture": "sm_121", "unified": True, "total_bytes": 1,
          "copy_gb_s": 221.0, "gemv_gb_s": 66.0, "matrix_bytes": 1}
print(json.dumps({"result": {"library": "torch", "devices": [device]}}))
"""
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(program)
    monkeypatch.setattr(bandwidth, "__file__", str(stand_in))
    monkeypatch.setattr("stoker.up.probe.nvidia_cards", lambda: [FakeCard("NVIDIA GB10", 0, 0, [])])
    found = probe_box()
    (card,) = found.cards
    assert (card.watts, card.clock_mhz, card.temperature_c) == (38.0, 2405, 61)
    assert card.held_back_by == ("its power limit",)
    assert card.busy_percent == 0  # before
    assert found.memory.unified
    slow = "this box reads weights at 29 % of what others measured (66 of 227 GB/s)"
    assert [each.kind for each in found.findings if each.text.startswith(slow)] == ["warning"]
    shown = "\n".join(lines(found))
    assert "NVIDIA GB10 reads weights at 66 GB/s (GEMV) and copies at 221, measured here with torch" in shown
    assert "published  227 GB/s of 273 on paper, 121.7 GiB (document 000" in shown
    assert "warning: this box reads weights at 29 %" in shown


@pytest.mark.parametrize(
    ("python", "said"),
    [("/no/such/python", "/no/such/python cannot be run: No such file"), ("/bin/false", "ended silently")],
)
def test_a_process_that_fails_leaves_the_rest(python, said):
    found = probe_box(python=python)
    assert found.speeds == ()
    assert "the speed of memory is not known" in found.problems[0]
    assert said in found.problems[0]
    assert found.disk


def test_a_file_of_the_model_tells_the_disk(without_torch, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(20 * MB))
    found = probe_box(model=folder, python=without_torch)
    assert found.disk
    assert found.disk.file.endswith("model.safetensors")
    assert found.disk.bytes == 16 * MB  # whole blocks
    missing = probe_box(model=tmp_path / "home", python=without_torch)
    assert missing.disk is None
    assert "holds no file of 8 MiB or more to read" in missing.problems[0]


def test_a_wrong_box_is_said_at_once():
    with pytest.raises(RequestError, match="unknown box 'sparc'"):
        probe_box(box="sparc", python="/bin/false")


def test_the_command_prints_one_json_document(without_torch):
    done = CliRunner().invoke(app, ["probe", "--json", "--box", "spark", "--python", without_torch])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["published"]["achievable_gb_s"] == 227
    assert found["speeds"][0]["device"] == "cpu"


def test_what_a_card_does_not_support_is_none(monkeypatch):
    def unsupported(*arguments):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in dir(pynvml):
        if name.startswith("nvmlDeviceGet"):
            monkeypatch.setattr(pynvml, name, unsupported)
    assert Card("NVIDIA GB10", 0, 0).read() == CardReading(None, None, None, None, None, None, None, None, ())
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda handle: 0x81)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", lambda handle: 9100)
    found = Card("NVIDIA GB10", 0, 0).read()
    assert (found.watts, found.held_back_by) == (9.1, ("the power supply (hardware power brake)",))
