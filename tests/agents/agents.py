"""Four coding agents: the npm package, the commands of two turns, and the settings that docs/guides/clients.md gives.

The settings are read from the guide, so that what people paste is what is tested. They include those that switch the
agents' own traffic to elsewhere (updates, statistics, lists of models) off.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.agents.scripted import Script
from tests.guides.blocks import GUIDES, blocks, section

COMMAND, LINE = "printf 'made by the model\\n' >> made.txt", "made by the model\n"
ANSWER = "The file made.txt has one more line."
FIRST, AGAIN = "Add a line to made.txt.", "Do it once more."
GUIDE = GUIDES / "clients.md"
ADDRESS = "http://127.0.0.1:8000"  # in the guide
MODEL = "qwen3.5-122b-hybrid-mtp2"  # likewise


def exported(heading: str) -> dict[str, str]:
    """What the guide tells to export for a program."""
    found: dict[str, str] = {}
    for block in blocks(section(GUIDE, heading)):
        for line in re.findall(r"^export (.+)$", block.text if block.language == "sh" else "", re.M):
            for word in shlex.split(line):
                name, _, value = word.partition("=")
                found[name] = value
    return _addressed(found)


def files(heading: str) -> dict[str, str]:
    """The files that the guide tells to write for a program, by path in the home folder."""
    return _addressed({block.file: block.text for block in blocks(section(GUIDE, heading)) if block.file})


def _addressed(settings: dict[str, str]) -> dict[str, str]:
    return {name: text.replace(ADDRESS, "SERVER") for name, text in settings.items()}


@dataclass(frozen=True)
class Agent:
    """In values of `environment` and in `files`, SERVER stands for the server's address."""

    package: str
    script: Script
    first: tuple[str, ...]  # the command of a first turn
    again: tuple[str, ...]  # and of one that goes on with the session
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # by path in the home folder
    titles: int = 0  # answers that it asks for before those of a first turn
    omitted: frozenset[str] = frozenset()  # what it offers and the server leaves out


CLAUDE_CODE = Agent(
    "@anthropic-ai/claude-code@2.1.326",
    Script("Bash", {"command": COMMAND, "description": "Add a line"}, ANSWER),
    ("claude", "-p", FIRST, "--allowedTools", "Bash"),
    ("claude", "-p", AGAIN, "--continue", "--allowedTools", "Bash"),
    environment=exported("Claude Code"),
    files=files("Claude Code"),
)

# Its sandbox is off: whether one can be made depends on the machine, and the command is our own.
_EXEC = ("codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access")
CODEX = Agent(
    "@openai/codex@0.169.0",
    Script("exec_command", {"cmd": COMMAND}, ANSWER),
    (*_EXEC, FIRST),
    (*_EXEC, "resume", "--last", AGAIN),
    environment=exported("Codex"),
    files=files("Codex"),
    omitted=frozenset({"tool:web_search"}),
)

QWEN_CODE = Agent(
    "@qwen-code/qwen-code@0.24.4",
    Script("run_shell_command", {"command": COMMAND, "is_background": "false"}, ANSWER),
    ("qwen", "-p", FIRST, "--yolo"),
    ("qwen", "-p", AGAIN, "--continue", "--yolo"),
    environment=exported("Qwen Code"),
    files=files("Qwen Code"),
)

OPENCODE = Agent(
    "opencode-ai@1.18.33",
    Script("bash", {"command": COMMAND, "description": "Add a line"}, ANSWER),
    ("opencode", "run", FIRST),
    ("opencode", "run", "--continue", AGAIN),
    environment=exported("opencode"),
    files=files("opencode"),
    titles=1,
)

AGENTS = {"Claude Code": CLAUDE_CODE, "Codex": CODEX, "Qwen Code": QWEN_CODE, "opencode": OPENCODE}
