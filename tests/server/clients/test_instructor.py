"""instructor in TOOLS mode: a pydantic model out of a forced call, whole and while it streams."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.clients.pypi import interpreter
from tests.server.running import Running

PACKAGES = ("instructor==1.17.0", "openai==3.3.0")
SCRIPT = Path(__file__).with_name("instructor_client.py")


@pytest.fixture(scope="module")
def python() -> Path:
    return interpreter(*PACKAGES)


def test_instructor_gets_nested_models_from_a_forced_call_without_asking_twice(server: Running, python: Path) -> None:
    ran = subprocess.run([python, SCRIPT, f"{server.url}/v1"], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    assert found["tool_choice"] == {"type": "function", "function": {"name": "Journey"}}
    schema = found["parameters"]
    assert set(schema["$defs"]) == {"Stop", "Fare", "Pass"}, "nested models are references"
    assert schema["properties"]["start"] == {"$ref": "#/$defs/Stop"}
    for journey in (found["whole"], found["last"]):
        assert list(journey) == ["vehicle", "start", "via", "ticket", "note", "seats"]
        assert 1 <= len(journey["via"]) <= 2
        assert journey["ticket"]["kind"] in ("fare", "pass")
    known = [sum(value is not None for value in partial.values()) for partial in found["partials"]]
    assert known == sorted(known)
    assert known[0] < known[-1], "first fields are there before last ones are written"
