"""Four coding agents: the npm package, the settings that point it at a server, and the commands of two turns.

Beside what a user would set, their own traffic to elsewhere (updates, statistics, lists of models) is switched off.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.agents.scripted import Script

COMMAND, LINE = "printf 'made by the model\\n' >> made.txt", "made by the model\n"
ANSWER = "The file made.txt has one more line."
FIRST, AGAIN = "Add a line to made.txt.", "Do it once more."


@dataclass(frozen=True)
class Agent:
    """In values of `environment` and in `files`, SERVER stands for the server's address."""

    package: str
    script: Script
    first: tuple[str, ...]  # the command of a first turn
    again: tuple[str, ...]  # and of one that goes on with the session
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # by path in the home folder
    server: tuple[str, ...] = ()  # options
    titles: int = 0  # answers that it asks for before those of a first turn
    omitted: frozenset[str] = frozenset()  # what it offers and the server leaves out


CLAUDE_CODE = Agent(
    "@anthropic-ai/claude-code@2.1.326",
    Script("Bash", {"command": COMMAND, "description": "Add a line"}, ANSWER),
    ("claude", "-p", FIRST, "--allowedTools", "Bash"),
    ("claude", "-p", AGAIN, "--continue", "--allowedTools", "Bash"),
    environment={
        "ANTHROPIC_BASE_URL": "SERVER",
        "ANTHROPIC_AUTH_TOKEN": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    },
    server=("--any-model",),
)

# Its sandbox is off: whether one can be made depends on the machine, and the command is our own.
_EXEC = ("codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access")
CODEX = Agent(
    "@openai/codex@0.169.0",
    Script("exec_command", {"cmd": COMMAND}, ANSWER),
    (*_EXEC, FIRST),
    (*_EXEC, "resume", "--last", AGAIN),
    files={
        ".codex/config.toml": """\
model = "stoker"
model_provider = "stoker"
check_for_update_on_startup = false

[model_providers.stoker]
name = "Stoker"
base_url = "SERVER/v1"
wire_api = "responses"

[analytics]
enabled = false

[feedback]
enabled = false
"""
    },
    omitted=frozenset({"tool:web_search"}),
)

QWEN_CODE = Agent(
    "@qwen-code/qwen-code@0.24.4",
    Script("run_shell_command", {"command": COMMAND, "is_background": "false"}, ANSWER),
    ("qwen", "-p", FIRST, "--yolo"),
    ("qwen", "-p", AGAIN, "--continue", "--yolo"),
    environment={"OPENAI_BASE_URL": "SERVER/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "stoker"},
    files={
        ".qwen/settings.json": json.dumps(
            {
                "general": {"enableAutoUpdate": False},
                "privacy": {"usageStatisticsEnabled": False},
                "telemetry": {"enabled": False},
            }
        )
    },
)

OPENCODE = Agent(
    "opencode-ai@1.18.33",
    Script("bash", {"command": COMMAND, "description": "Add a line"}, ANSWER),
    ("opencode", "run", FIRST),
    ("opencode", "run", "--continue", AGAIN),
    environment={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
    files={
        ".config/opencode/opencode.json": json.dumps(
            {
                "model": "stoker/stoker",
                "provider": {
                    "stoker": {
                        "npm": "@ai-sdk/openai-compatible",
                        "name": "Stoker",
                        "options": {"baseURL": "SERVER/v1"},
                        "models": {"stoker": {"name": "stoker"}},
                    }
                },
                "autoupdate": False,
                "share": "disabled",
            }
        )
    },
    titles=1,
)
