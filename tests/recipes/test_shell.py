"""Shell steps are shown, run only when the user agrees, and end with their failure said."""

import subprocess
import time

import pytest

from stoker.recipes.recipe import Container, Files, Recipe, Step
from stoker.recipes.shell import ShellError, confirm, inside, on_this_machine, problems, run, shown

DIGEST = "vllm/vllm-openai@sha256:" + "0" * 64


def recipe(*steps, container=None):
    return Recipe("mine", "Mine", Files("hf:a/b"), engine="vllm", shell=list(steps), container=container)


def test_without_steps_nobody_is_asked():
    said: list[str] = []
    confirm(recipe(), yes=False, say=said.append, ask=None)
    assert not said


def test_steps_are_shown_before_anybody_agrees_to_them():
    said: list[str] = []
    steps = recipe(Step("make it\nrun", note="a patch"), Step("curl x", when="after", inside=True))
    confirm(steps, yes=True, say=said.append)
    text = "\n".join(said)
    assert "2 shell steps" in text
    assert "before the engine starts, on this machine: a patch\n       make it\n       run" in text
    assert "once the engine answers, inside the container\n       curl x" in text


def test_what_a_terminal_would_obey_is_shown_as_an_escape():
    [_, line] = shown([Step("rm -rf / \x1b[2K\recho harmless")])
    assert "\x1b" not in line
    assert "\r" not in line
    assert "rm -rf /" in line


def test_without_agreement_they_do_not_run():
    with pytest.raises(ShellError, match="--yes"):
        confirm(recipe(Step("true")), yes=False, say=lambda line: None, ask=None)
    with pytest.raises(ShellError, match="declined"):
        confirm(recipe(Step("true")), yes=False, say=lambda line: None, ask=lambda question: False)
    confirm(recipe(Step("true")), yes=False, say=lambda line: None, ask=lambda question: True)


def test_steps_inside_a_container_need_one():
    step = Step("true", inside=True)
    assert "names none" in problems(recipe(step))[0]
    assert not problems(recipe(step, container=Container(DIGEST)))
    assert not problems(recipe(Step("true")))


def test_a_step_runs_in_the_folder_with_the_environment_and_says_its_output(tmp_path):
    said: list[str] = []
    run(Step('pwd; echo "$STOKER_URL"; echo oops >&2'), tmp_path, {"STOKER_URL": "http://x"}, said.append)
    assert said == [str(tmp_path), "http://x", "oops"]


def test_a_failing_step_is_named_with_its_last_lines(tmp_path):
    with pytest.raises(ShellError, match=r"`echo no; exit 3` failed with exit status 3. Its last lines: no"):
        run(Step("echo no; exit 3"), tmp_path, {}, lambda line: None)


def test_a_step_that_hangs_is_ended_with_its_children(tmp_path):
    pids = tmp_path / "pids"
    with pytest.raises(ShellError, match="longer than 1 s"):
        run(Step(f"sleep 60 & echo $! > {pids}; wait"), tmp_path, {}, lambda line: None, timeout_s=1)
    child = int(pids.read_text())
    for _ in range(100):
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(child)], capture_output=True, text=True).stdout.strip()
        if not state or state.startswith("Z"):
            return
        time.sleep(0.02)
    pytest.fail("its child still runs")


def test_steps_inside_run_before_the_engine_and_a_failing_one_ends_it(tmp_path):
    engine = ("echo", "engine", "with two words")
    good = inside([Step("echo first", inside=True), Step("echo here"), Step("x", when="after", inside=True)], engine)
    assert subprocess.run(good, capture_output=True, text=True).stdout == "first\nengine with two words\n"
    bad = subprocess.run(inside([Step("false", inside=True)], engine), capture_output=True, text=True)
    assert bad.returncode == 1
    assert "shell step 1 of 1 of the recipe failed" in bad.stderr
    assert "engine" not in bad.stdout
    assert inside([Step("echo here")], engine) == engine


def test_those_of_this_machine_are_chosen_by_moment():
    here, later = Step("a"), Step("b", when="after")
    assert on_this_machine([here, later, Step("c", inside=True)], "before") == [here]
    assert on_this_machine([here, later], "after") == [later]
