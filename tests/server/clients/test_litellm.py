"""litellm's own error for a prompt beyond the context, by which it falls back to a model with a longer one."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.server.clients.pypi import interpreter
from tests.server.running import Running

PACKAGES = ("litellm==1.106.2",)
SCRIPT = Path(__file__).with_name("litellm_client.py")


@pytest.fixture(scope="module")
def python() -> Path:
    return interpreter(*PACKAGES)


def test_litellm_knows_a_prompt_beyond_the_context_through_both_apis(server: Running, python: Path) -> None:
    ran = subprocess.run([python, SCRIPT, server.url], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert [(each["model"], each["streamed"]) for each in found] == [
        (model, streamed) for model in ("openai/demo", "anthropic/demo") for streamed in (False, True)
    ]
    for each in found:
        assert each["tokens"] == 4, "a prompt that fits is answered"
        words = "maximum context length is 8192" if each["model"].startswith("openai") else "prompt is too long: 9"
        assert words in (each["error"] or "no ContextWindowExceededError"), each
