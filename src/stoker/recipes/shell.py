"""Shell steps of a recipe: shown, asked about, and run. Nothing runs before `confirm` has returned."""

import os
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from stoker.errors import StokerError, visible
from stoker.recipes.recipe import Recipe, Step

LAST_LINES = 5  # of a step's output, in the message when it fails
TIMEOUT_S = 3600.0


class ShellError(StokerError):
    """A shell step that nobody agreed to, that cannot run here, or that failed."""


def problems(recipe: Recipe) -> list[str]:
    """Why its steps could not run, as sentences."""
    inside = [step for step in recipe.shell if step.inside]
    if inside and not recipe.container:
        return [
            f"{_count(len(inside), 'shell step')} of the recipe run{'s' if len(inside) == 1 else ''} inside a "
            "container, and the recipe names none: add [container] with an image by digest, or say inside = false "
            "in [[shell]] to run them on this machine."
        ]
    return []


def shown(steps: Sequence[Step]) -> list[str]:
    """The steps as a person should read them before agreeing: every character visible."""
    lines = []
    for number, step in enumerate(steps, 1):
        where = "inside the container" if step.inside else "on this machine"
        moment = "before the engine starts" if step.when == "before" else "once the engine answers"
        note = f": {visible(step.note, keep='')}" if step.note else ""
        lines.append(f"{number}. {moment}, {where}{note}")
        lines += [f"       {visible(line, keep='')}" for line in step.run.rstrip("\n").split("\n")]
    return lines


def confirm(recipe: Recipe, yes: bool, say: Callable[[str], None], ask: Callable[[str], bool] | None = None) -> None:
    """Shows the recipe's steps and returns if they may run. `ask` is None where nobody can be asked."""
    if not recipe.shell:
        return
    say(f"The recipe {recipe.name} has {_count(len(recipe.shell), 'shell step')}:")
    for line in shown(recipe.shell):
        say(line)
    if yes:
        return
    if ask is None:
        raise ShellError(
            f"the recipe {recipe.name} has {_count(len(recipe.shell), 'shell step')}, and they run only if you agree: "
            "read them above and add --yes, or take [[shell]] out of the recipe."
        )
    if not ask("Run them?"):
        raise ShellError("the recipe's shell steps were declined, so nothing was started.")


def on_this_machine(steps: Sequence[Step], when: str) -> list[Step]:
    return [step for step in steps if step.when == when and not step.inside]


def inside(steps: Sequence[Step], command: Sequence[str]) -> tuple[str, ...]:
    """The engine's command for a container in which the steps before it run first; a failing one ends it."""
    first = [step for step in steps if step.inside and step.when == "before"]
    if not first:
        return tuple(command)
    lines = []
    for number, step in enumerate(first, 1):
        failed = f'echo "shell step {number} of {len(first)} of the recipe failed" >&2; exit 1'
        lines += ["(", step.run.rstrip("\n"), f") || {{ {failed}; }}"]
    return ("bash", "-c", "\n".join([*lines, 'exec "$@"']), "stoker", *command)


def run(
    step: Step,
    folder: Path,
    env: Mapping[str, str],
    say: Callable[[str], None],
    prefix: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Runs a step that the user has agreed to, in the recipe's folder, and passes on its output line by line.

    `env` is set beside the environment of this process. `prefix` leads into a container, as docker exec NAME.
    """
    bash = "bash" if prefix else shutil.which("bash") or "sh"
    process = subprocess.Popen(
        [*prefix, bash, "-c", step.run],
        cwd=folder,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    expired = threading.Event()

    def end() -> None:
        expired.set()
        _kill(process)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    last: deque[str] = deque(maxlen=LAST_LINES)
    try:
        assert process.stdout
        for line in process.stdout:
            last.append(visible(line.rstrip("\n"), keep=""))
            say(last[-1])
        status = process.wait()
    except BaseException:  # Ctrl-C
        _kill(process)
        process.wait()
        raise
    finally:
        timer.cancel()
    if expired.is_set():
        raise ShellError(f"{_called(step)} took longer than {timeout_s:,.0f} s and was ended.")
    if status:
        said = f" Its last lines: {' / '.join(last)}" if last else ""
        raise ShellError(f"{_called(step)} failed with exit status {status}.{said}")


def _kill(process: "subprocess.Popen[str]") -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _called(step: Step) -> str:
    first = step.run.strip().split("\n")[0]
    return f"the shell step `{first if len(first) <= 60 else first[:59] + '…'}`"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
