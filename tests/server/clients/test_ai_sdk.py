"""The AI SDK (npm `ai`) with its default provider, `@ai-sdk/openai`, which speaks the Responses API."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.clients.npm import installed
from tests.server.running import Running

PACKAGES = ("ai@6.0.326", "@ai-sdk/openai@3.0.141", "zod@4.6.7")
SCRIPT = Path(__file__).with_name("ai_sdk.mjs")


@pytest.fixture(scope="module")
def folder() -> Path:
    found = installed(*PACKAGES)
    shutil.copy(SCRIPT, found)  # node looks for packages beside the script
    return found


def test_the_ai_sdk_streams_a_text_and_completes_a_turn_with_a_tool(server: Running, folder: Path) -> None:
    ran = subprocess.run(
        ["node", SCRIPT.name, f"{server.url}/v1"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert all(request["url"].endswith("/v1/responses") for request in found["sent"])
    assert found["text"] == found["whole"] != ""
    assert found["usage"]["outputTokens"] > 0
    called, answered = found["steps"]
    (call,) = called["calls"]
    assert call["city"] in ("Oslo", "Rome")
    assert called["results"] == [f"{call['seats']} seats to {call['city']} at 08:10"]
    assert answered["finish"] in ("stop", "length")
    second = [item.get("type") for item in found["sent"][-1]["body"]["input"]]
    assert "item_reference" in second, "it refers to what the server said before"
    assert "function_call_output" in second
