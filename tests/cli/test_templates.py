"""A chat template's faults are one sentence and exit code 2 for `generate --chat` and `chat`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.random_checkpoint import small_config, write_random_checkpoint
from tests.support.tokenizer import write_byte_tokenizer

ADVICE = "Shorten the conversation, or correct the template."
FAULTS = {
    "{{ raise_exception('Roles must alternate.') }}": "Roles must alternate.",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": (
        f"chat_template.jinja took more than the 5 s that it may take. {ADVICE}"
    ),
    "{{ 'x' * 10 ** 10 }}": f"chat_template.jinja needs more than the 256 MiB of memory that it may take. {ADVICE}",
    "{% if %}": (
        "chat_template.jinja is no template that jinja can read: line 1: Expected an expression, "
        "got 'end of statement block'. Correct it, or fetch the file again."
    ),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("templates") / "model"
    write_random_checkpoint(found, small_config())
    write_byte_tokenizer(found)
    return found


def stoker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from stoker.cli.main import run; run()", *arguments],
        input="hello\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("template", FAULTS, ids=lambda template: template[:30])
def test_generate_says_it_in_a_sentence(directory: Path, template: str) -> None:
    (directory / "chat_template.jinja").write_text(template)
    done = stoker("generate", "--model", str(directory), "--chat", "--prompt", "hello", "--max-tokens", "2")
    error = f"error: The chat template cannot render this conversation: {FAULTS[template]}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", error)


def test_chat_says_it_in_a_sentence(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ raise_exception('Roles must alternate.') }}")
    done = stoker("chat", "--model", str(directory), "--max-tokens", "2")
    assert done.returncode == 2
    assert done.stderr.endswith("error: The chat template cannot render this conversation: Roles must alternate.\n")
    assert "Traceback" not in done.stderr


def test_with_debug_the_traceback_is_kept(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ raise_exception('Roles must alternate.') }}")
    done = stoker("--debug", "generate", "--model", str(directory), "--chat", "--prompt", "hello")
    assert "Traceback" in done.stderr
    assert "Roles must alternate." in done.stderr
