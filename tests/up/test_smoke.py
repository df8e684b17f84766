"""The smoke test finds what an engine that is ready gets wrong."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker.bench.target import Target
from stoker.up.processes import free_port
from stoker.up.smoke import Smoke, SmokeError, smoke_test
from tests.support.services import ask, wait

FAKE = Path(__file__).parents[1] / "support" / "fake_serve.py"


@contextmanager
def engine(**fake: str) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-I", "-S", str(FAKE), "--port", str(port), "--served-model-name", "m"]
    command += [word for key, value in fake.items() for word in ("--fake", f"{key}={value}")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={"PATH": os.environ["PATH"]})
    url = f"http://127.0.0.1:{port}"
    try:
        wait(lambda: _answers(url))
        yield url
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return ask(f"{url}/health")[0] == 200
    except OSError:
        return False


def outcome(url: str, caches: bool = True, exact: bool = True) -> tuple[Smoke, list[str]]:
    told: list[str] = []

    async def run() -> Smoke:
        async with Target(url) as target:
            return await smoke_test(target, caches, exact, told.append)

    return asyncio.run(run()), told


def test_an_engine_that_works_passes():
    with engine() as url:
        found, told = outcome(url)
        again, _ = outcome(url)
    assert told == ["a streamed chat answer", "a tool call", "one long prompt twice", "a fixed greedy answer"]
    assert found.chat_tokens == 16
    assert (found.tool_choice, found.tool_call) == ("auto", 'get_weather({"city": "Paris"})')
    assert found.long_prompt_tokens == 1024, "a quarter of the context"
    assert found.cached_tokens
    assert found.identical
    assert found.greedy_sha256 == again.greedy_sha256
    assert not found.notes


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"tools": "none"}, "forced tool call holds no call"),
        ({"cache": "none"}, "computed twice: nothing of it was cached"),
        ({"again": "other"}, "cold and cached, differ at token 1"),
        ({"tools": "other"}, r"not of the tool that was offered: get_time"),
        ({"tools": "broken"}, "no JSON"),
    ],
)
def test_an_engine_that_does_not_is_found_out(fault, says):
    with engine(**fault) as url, pytest.raises(SmokeError, match=says):
        outcome(url)


def test_what_is_not_asked_of_an_engine_is_noted():
    with engine(again="late", cache="none") as url:
        found, _ = outcome(url, caches=False, exact=False)
        with pytest.raises(SmokeError, match="differ at token 13"):
            outcome(url, caches=False, exact=True)
    assert not found.identical
    (note,) = found.notes
    assert note.endswith("differ at token 13; this engine does not promise that they are equal")
