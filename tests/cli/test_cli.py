"""The `stoker` command as people meet it: a real process, its output, its exit code."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from stoker import __version__ as version
from stoker.cli.extras import install_command
from stoker.cli.generate import Answer
from tests.support.random_checkpoint import small_config, small_drafter_config, write_random_drafter

KEYS = {
    "text", "token_ids", "prompt_tokens", "completion_tokens", "steps", "accepted_per_step", "tokens_per_s",
    "steps_per_s",
}  # fmt: skip


def stoker(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from stoker.cli.main import run; run()", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    "arguments",
    [("plan", "122b", "--box", "spark", "--explain"), ("plan", "122b", "--box", "no such box"), ("evidence", "122b")],
)
def test_a_terminal_that_holds_ascii_alone_gets_text_and_no_traceback(arguments: tuple[str, ...]) -> None:
    done = stoker(*arguments, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 2)
    assert (done.stdout + done.stderr).isascii()


def test_on_such_a_terminal_a_prediction_still_reads_as_one_and_accents_are_dropped() -> None:
    replacing = "from stoker.cli.progress import replace_unencodable as r; r(); print('≈ 40 tok/s · Árvíz ✓ 中')"
    done = subprocess.run(
        [sys.executable, "-c", replacing],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.stdout == "~ 40 tok/s . Arviz + ?\n"


def test_the_version_is_the_packages() -> None:
    assert stoker("--version").stdout == f"stoker {version}\n"


@pytest.mark.parametrize(
    ("words", "expected"), [("stoker pl", "plan"), ("stoker serve --con", "--context"), ("stoker recipe i", "import")]
)
def test_a_shell_completes_commands_and_options(words: str, expected: str) -> None:
    done = stoker(_STOKER_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
    assert done.stdout.split() == [expected]


def test_the_script_that_sets_completion_up_is_shown_and_calls_stoker() -> None:
    done = stoker("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_STOKER_COMPLETE=complete_bash" in done.stdout
    assert done.stdout.rstrip().endswith("stoker")


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="a folder where even root cannot write: /proc")
def test_a_page_that_cannot_be_written_after_all_is_a_sentence() -> None:
    done = stoker("plan", "122b", "--box", "spark", "--html", "/proc/page.html")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "error: /proc/page.html cannot be written" in done.stderr


def test_files_that_cannot_be_written_are_refused_before_the_work(tmp_path: Path) -> None:
    missing = tmp_path / "none" / "page.html"
    done = stoker("plan", "122b", "--box", "spark", "--html", str(missing))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert f"there is no directory {missing.parent}" in done.stderr
    done = stoker("plan", "122b", "--box", "spark", "--html", str(tmp_path))
    assert (done.returncode, "is a directory" in done.stderr) == (2, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_serving_on_a_card_that_is_not_there_is_refused_in_a_sentence() -> None:
    done = stoker("serve", "--model", "demo", "--device", "cuda", "--port", "0")
    assert done.returncode == 2
    assert "error: --device cuda" in done.stderr
    assert "Traceback" not in done.stderr


def test_generate_prints_text_and_a_line_of_numbers(checkpoints: dict[str, Path]) -> None:
    done = stoker("generate", "--model", str(checkpoints["qwen3_5_moe_text"]), "--prompt", "Hello", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert "5 tokens in, 8 out" in done.stderr
    assert "Traceback" not in done.stderr


def test_generate_json_has_the_promised_keys_and_agrees_with_itself(checkpoints: dict[str, Path]) -> None:
    arguments = ("generate", "--model", str(checkpoints["qwen3_moe"]), "--prompt", "Hi", "--max-tokens", "6", "--json")
    done = stoker(*arguments)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result) >= KEYS
    assert result["prompt_tokens"] == 2
    assert result["completion_tokens"] == len(result["token_ids"]) == 6
    assert result["steps"] == 5
    assert result["accepted_per_step"] == 1.0
    assert json.loads(stoker(*arguments).stdout.splitlines()[-1])["token_ids"] == result["token_ids"]


def test_drafting_changes_steps_and_never_tokens(drafted: Path) -> None:
    arguments = ("generate", "--model", str(drafted), "--prompt", "abcabcabcabcd", "--max-tokens", "24", "--json")
    plain = json.loads(stoker(*arguments, "--draft", "none").stdout)
    for draft in ("lookup+mtp:3", "dflash:5"):  # tests/engine/test_lossless.py has all of them
        fast = json.loads(stoker(*arguments, "--draft", draft).stdout)
        assert fast["token_ids"] == plain["token_ids"]
        made = len(plain["token_ids"])  # the first token came out of prefill
        assert fast["accepted_per_step"] == pytest.approx((made - 1) / fast["steps"])


@pytest.fixture(scope="module")
def drafted(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a DFlash network beside it."""
    directory = tmp_path_factory.mktemp("drafted") / "model"
    shutil.copytree(checkpoints["qwen3_5_moe_text"], directory)
    write_random_drafter(directory / "drafter", small_drafter_config(small_config()))
    return directory


@pytest.mark.parametrize(
    ("family", "draft", "words"),
    [
        ("qwen3_moe", "mtp:2", "has no MTP head"),
        ("qwen3_moe", "dflash:4", "drafter does not exist"),
        ("qwen3_moe", "mtp:9", "mtp drafts 1 to 8 tokens a step, not 9"),
    ],
)
def test_a_draft_that_cannot_be_had_is_refused(
    checkpoints: dict[str, Path], family: str, draft: str, words: str
) -> None:
    done = stoker("generate", "--model", str(checkpoints[family]), "--prompt", "x", "--draft", draft)
    assert done.returncode == 2
    assert words in done.stderr


def test_chat_wraps_the_prompt_in_the_template(checkpoints: dict[str, Path]) -> None:
    arguments = ("--prompt", "Hi", "--max-tokens", "2", "--chat", "--json")
    done = stoker("generate", "--model", str(checkpoints["qwen3_5_text"]), *arguments)
    assert done.returncode == 0, done.stderr
    # <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n, markup as one token each
    assert json.loads(done.stdout)["prompt_tokens"] == 5 + 1 + 2 + 1 + 1 + 1 + 10 + 1 + 2 + 1 + 2


@pytest.mark.parametrize("thinking", [True, False], ids=["the template opened the thought", "the model opened it"])
def test_in_a_chat_only_the_answer_is_on_stdout_and_tags_are_nowhere(
    thinking: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ("" if thinking else "<think>\n") + "Seven times eight.\n</think>\n\n56"
    for size in (1, 3, len(said)):
        answer = Answer(True, thinking, quiet=False)
        for start in range(0, len(said), size):
            answer.push(said[start : start + size])
        answer.finish()
        printed = capsys.readouterr()
        assert (printed.out, printed.err) == ("56", "Seven times eight.\n\n")
        assert (answer.text, answer.thought) == ("56", "Seven times eight.")


def test_without_a_chat_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer(False, False, quiet=False)
    answer.push("<think> is a tag")
    answer.finish()
    assert capsys.readouterr().out == "<think> is a tag"


def test_a_mistake_is_one_sentence_and_exit_code_2_and_debug_shows_the_traceback() -> None:
    done = stoker("generate", "--model", "/nowhere", "--prompt", "x")
    assert done.returncode == 2
    assert done.stderr.startswith("error: /nowhere/config.json does not exist")
    assert "Traceback" not in done.stderr
    for arguments in (("--debug", "generate"), ("generate", "--debug")):
        done = stoker(*arguments, "--model", "/nowhere", "--prompt", "x")
        assert done.returncode != 0
        assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("file", "words"), [("tokenizer", "has no tokenizer"), ("config", "is not valid JSON (line 1")]
)
def test_broken_directories_are_named(checkpoints: dict[str, Path], tmp_path: Path, file: str, words: str) -> None:
    directory = tmp_path / "model"
    shutil.copytree(checkpoints["qwen3_5_text"], directory)
    if file == "tokenizer":
        for path in directory.glob("tokenizer*"):
            path.unlink()
    else:
        (directory / "config.json").write_text('{"model_type": ')
    done = stoker("generate", "--model", str(directory), "--prompt", "x")
    assert done.returncode == 2
    assert words in done.stderr
    assert str(directory) in done.stderr


def test_bad_numbers_are_refused_before_loading(checkpoints: dict[str, Path]) -> None:
    done = stoker("generate", "--model", str(checkpoints["qwen3_moe"]), "--prompt", "x", "--max-tokens", "0")
    assert done.returncode == 2
    assert "max_tokens is 0, expected at least 1" in done.stderr


def test_help_does_not_import_torch() -> None:
    probe = (
        "import sys; from typer.testing import CliRunner; from stoker.cli.main import app;"
        "result = CliRunner().invoke(app, ['--help']); assert 'generate' in result.output;"
        "heavy = {'torch', 'transformers', 'safetensors'} & set(sys.modules); assert not heavy, heavy"
    )
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)
    assert time.perf_counter() - started < 30  # a hang, not a benchmark


def test_a_server_imports_no_torch_beside_that_of_its_engine() -> None:
    """It took three quarters of the time until a server could answer, and a quarter of a gigabyte."""
    probe = (
        "import sys, stoker.cli.serve, stoker.server.app, stoker.server.lifecycle.run;"
        "import stoker.engine.event, stoker.engine.rules;"
        "from stoker.demo import EMBEDDED; from stoker.server.config import ServerConfig;"
        "from stoker.server.lifecycle.memory_guard import Reading;"
        "from stoker.server.lifecycle.plan import plan_engine;"
        "plan_engine(ServerConfig(directory=EMBEDDED, names=('demo',)), Reading(8 << 30, 16 << 30));"
        "from stoker.server.model import ServedModel;"
        "assert ServedModel(EMBEDDED, ['demo'], 512, {}).tokenizer.decode([40, 41]);"
        "import transformers; assert 'torch' not in sys.modules;"
        "import torch; assert torch.zeros(1).sum() == 0"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=300)


def test_the_parts_of_a_base_install_work_without_torch() -> None:
    absent = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'safetensors')));"
    modules = "stoker.cli.main, stoker.weights.model_config, stoker.weights.checkpoint, stoker.weights.resolve"
    subprocess.run([sys.executable, "-c", f"{absent} import {modules}"], check=True, timeout=60)
    code = f"{absent} from stoker.cli.main import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", "--model", "m", "--prompt", "x"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert install_command("engine") in done.stderr.replace("\n", " ")
