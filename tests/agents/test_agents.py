"""Coding agents from npm, with their own prompts and tools, against `stoker serve` and a model that follows a script.

They run where only this machine can be reached, if such a place can be made.
"""

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.up.clients import settings
from tests.agents.agents import AGENTS, ANSWER, CLAUDE_CODE, COMMAND, GUIDE, LINE, MODEL, Agent
from tests.agents.network import loopback_only
from tests.agents.scripted import write_scripted_checkpoint
from tests.server.clients.npm import installed
from tests.server.running import Running

PATIENCE_S = 240.0  # for one turn on a loaded machine
EACH = [pytest.param(agent, id=name) for name, agent in AGENTS.items()]


class Session:
    """An agent in a folder of its own, with a home folder of its own, beside its server."""

    def __init__(self, agent: Agent, place: Path, server: Running) -> None:
        self._agent, self._server = agent, server
        self._home, self._work = place / "home", place / "work"
        for folder in (self._home / "tmp", self._work):
            folder.mkdir(parents=True)
        for path, text in agent.files.items():
            (self._home / path).parent.mkdir(parents=True, exist_ok=True)
            (self._home / path).write_text(self._addressed(text), encoding="utf-8")

    def run(self, program: str, *arguments: str) -> str:
        """What it prints to stdout."""
        ran = subprocess.run(
            [installed(self._agent.package) / "node_modules" / ".bin" / program, *arguments],
            cwd=self._work,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self._home),
                "TMPDIR": str(self._home / "tmp"),
                **{name: self._addressed(value) for name, value in self._agent.environment.items()},
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        told = f"{program} ended with {ran.returncode}:\n{ran.stdout}\n{ran.stderr}\nserver:\n{self.log}"
        assert ran.returncode == 0, told
        return ran.stdout.strip()

    @property
    def log(self) -> str:
        """The server's."""
        return self._server.log

    @property
    def made(self) -> str:
        """What the tool has written."""
        return (self._work / "made.txt").read_text(encoding="utf-8")

    @property
    def answers(self) -> list[tuple[int, int]]:
        """Tokens of the prompt, and how many of them were cached, of each answer of the server."""
        found = re.findall(r"(\d+) tokens in \((\d+) cached\)", self.log)
        return [(int(tokens), int(cached)) for tokens, cached in found]

    @property
    def omitted(self) -> set[str]:
        found = re.findall(r"answered without (\S+), which", self.log)
        return {name for line in found for name in line.split(",")}

    def _addressed(self, text: str) -> str:
        return text.replace("SERVER", self._server.url)


@contextmanager
def session(agent: Agent, place: Path, *options: str) -> Iterator[Session]:
    installed(agent.package)  # while npm can be reached
    model = place / "model"
    write_scripted_checkpoint(model, agent.script)
    with loopback_only():
        server = Running("--model", str(model), "--served-model-name", MODEL, *options)
        try:
            yield Session(agent, place, server.wait())
        finally:
            server.stop()


def test_nobody_but_this_machine_can_be_reached() -> None:
    with loopback_only() as alone:
        if not alone:
            pytest.skip("a network namespace takes root on Linux; agents run with their outbound settings off alone")
        with pytest.raises(OSError, match="unreachable"):
            socket.create_connection(("192.0.2.1", 80), timeout=5.0)


def test_the_guide_gives_every_agent_the_server_and_the_model_and_names_the_versions_that_are_tested() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    for name, agent in AGENTS.items():
        given = "\n".join([*agent.environment.values(), *agent.files.values()])
        assert "SERVER" in given, name
        assert MODEL in given, name
        assert f"{name} {agent.package.rpartition('@')[2]}" in guide


def test_the_guide_says_what_stoker_up_prints() -> None:
    guide = " ".join(GUIDE.read_text(encoding="utf-8").replace("\\\n", "").split())
    for program, text in settings("http://127.0.0.1:8000", MODEL, 131072, key=False).items():
        lines = [line.partition("   #")[0].removesuffix("\\").strip() for line in text.split("\n")]
        missing = [line for line in lines if not line.startswith("#") and " ".join(line.split()) not in guide]
        assert not missing, f"{program}: {missing}"


@pytest.mark.parametrize("agent", EACH)
def test_an_agent_completes_two_turns_with_a_tool_call_each(agent: Agent, tmp_path: Path) -> None:
    with session(agent, tmp_path) as running:
        assert running.run(*agent.first).endswith(ANSWER)
        assert running.made == LINE
        (called, _), (_, cached) = running.answers[agent.titles :]
        assert called - cached < 128, "the second request of a turn begins with what the first one left cached"
        assert running.run(*agent.again).endswith(ANSWER)
        assert running.made == LINE * 2
        assert len(running.answers) == agent.titles + 4
        assert running.omitted == agent.omitted
        assert not re.search("WARNING|ERROR|Traceback", running.log), running.log


@pytest.mark.long
def test_claude_code_compacts_a_session_that_has_outgrown_the_context(tmp_path: Path) -> None:
    lengthy = replace(CLAUDE_CODE.script, arguments={"command": f"seq 10001 10500; {COMMAND}"})  # 3,000 tokens
    agent = replace(CLAUDE_CODE, script=lengthy)
    with session(agent, tmp_path, "--context", "24000") as running:  # of which system prompt and tools take 16,500
        for command in (agent.first, agent.again):
            assert running.run(*command).endswith(ANSWER)
        told = running.run(*agent.again, "--output-format", "stream-json", "--verbose")
        assert '"compact_result":"success"' in told
        assert ANSWER in told.splitlines()[-1]
        assert running.made == LINE * 3
        assert running.run(*agent.again).endswith(ANSWER)
