"""What sparkrun and spark-vllm-docker share: a command with {keys} that `defaults` fill in."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoker.recipes.formats.command import CommandError, take_apart
from stoker.recipes.formats.flags import Option
from stoker.recipes.formats.foreign import SECRET_SCRIPT, Foreign, Note, environment, hides, note
from stoker.recipes.formats.yaml_file import Table
from stoker.recipes.recipe import Step

# Keys of `defaults` that both tools, or their users, give these options.
KEYS = {
    "--served-model-name": "served_model_name",
    "--host": "host",
    "--port": "port",
    "--max-model-len": "max_model_len",
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--kv-cache-dtype": "kv_cache_dtype",
    "--gpu-memory-utilization": "gpu_memory_utilization",
    "--tool-call-parser": "tool_call_parser",
    "--reasoning-parser": "reasoning_parser",
    "--tensor-parallel-size": "tensor_parallel",
    "--pipeline-parallel-size": "pipeline_parallel",
}
_TEMPLATE = re.compile(r"\{[A-Za-z_]\w*\}")

Fill = Callable[[str, Mapping[str, Any]], tuple[str, set[str]]]


def defaults(table: Table) -> dict[str, Any]:
    """The values for templates: single ones only."""
    found = table.table("defaults")
    for key, value in found.values.items():
        if isinstance(value, list | dict):
            raise found.error(key, "a value of defaults is a text or a number, and this is a list or a table.")
    return {key: value for key, value in found.values.items() if value is not None}


def read_command(foreign: Foreign, table: Table, values: dict[str, Any], fill: Fill) -> None:
    """Takes the command over, with what of `values` it uses."""
    try:
        text, used = fill(table.text("command"), values)
        serving = take_apart(text)
    except CommandError as error:
        raise table.error("command", f"{error}.") from None
    if hides(serving.before):
        note(foreign, "command", serving.before, SECRET_SCRIPT)
    elif serving.before:
        foreign.shell.append(Step(serving.before, inside=True))
    for what, why in serving.problems:
        note(foreign, "command", what, why)
    environment(foreign, serving.env, "command: ")
    foreign.arguments = serving.arguments
    if serving.model and serving.model != foreign.model:
        if foreign.model:
            note(foreign, "model", foreign.model, "the command serves another one, which counts")
        foreign.model, foreign.model_place = serving.model, "command"
    for key in values:
        if key not in used and key != "model":
            note(foreign, f"defaults.{key}", values[key], "its command does not use it")
    for left in sorted(set(_TEMPLATE.findall(" ".join(serving.arguments)))):
        note(foreign, "command", left, "it has no value in defaults and stays as it is")


def write_command(
    model: str,
    arguments: Sequence[Option],
    escape: Callable[[str], str | None],
    env: Mapping[str, str],
    before: Sequence[str] = (),
) -> tuple[str, dict[str, Any], list[Note]]:
    """A command and its defaults. `escape` writes text that is no template; None: it cannot be written."""
    values: dict[str, Any] = {}
    notes: list[Note] = []
    lines = [f"vllm serve {model}"]
    for key, value in env.items():
        written = escape(shlex.quote(value))
        if written is None:
            notes.append(Note(f"env.{key}", "it looks like a template of that format"))
        else:
            lines.insert(0, f"{key}={written}")
    for option in arguments:
        key = KEYS.get(option.flag, "")
        value = option.values[0] if len(option.values) == 1 else ""
        if key and value and key not in values and shlex.quote(value) == value:
            values[key] = _number(value)
            lines.append(f"{option.flag} {{{key}}}")
            continue
        written = escape(shlex.join(option.written))
        if written is None:
            notes.append(Note(shlex.join(option.written), "it looks like a template of that format"))
        else:
            lines.append(written)
    command = " \\\n  ".join(lines) + "\n"
    scripts = []
    for script in before:
        written = escape(script)
        if written is None:
            notes.append(Note(f"shell: {script}", "it looks like a template of that format"))
        else:
            scripts.append(f"{written}\n")
    return "".join([*scripts, command]), values, notes


def _number(text: str) -> Any:
    """As YAML writes it, if that gives the same text back."""
    for kind in (int, float):
        try:
            if str(kind(text)) == text:
                return kind(text)
        except ValueError:
            pass
    return text
