"""The shell command of a recipe taken apart: what runs before `vllm serve`, its environment and its arguments.

No shell runs here. What only a shell could tell (variables, substitutions, pipes) is reported, not guessed.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

LONGEST = 64 << 10  # characters that fill in the templates of a command
DEEPEST = 10  # values that refer to values
_CONTINUED = re.compile(r"\\[ \t]*\n")
_KEY = re.compile(r"\{([A-Za-z_]\w*)\}")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_NEEDS_SHELL = re.compile(r"\$[A-Za-z_{(]|`")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_QUOTED = re.compile(rf"""'[^']*'|{_ESCAPED.pattern}|"((?:{_ESCAPED.pattern}|[^"\\])*)\"""", re.DOTALL)
_REDIRECTED = re.compile(r"(?:\d*|&)(?:>>|<<|>|<)(.*)", re.DOTALL)
_NUMBER = re.compile(r"-\d+(\.\d+)?")
_MODULE = "vllm.entrypoints.openai.api_server"


class CommandError(ValueError):
    """A command that cannot be taken apart; the message is half a sentence."""


@dataclass
class Serving:
    """`vllm serve MODEL ARGUMENTS`, and what stands around it."""

    model: str = ""
    arguments: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    before: str = ""  # a script
    problems: list[tuple[str, str]] = field(default_factory=list)  # what is not carried over, and why


def fill(text: str, values: Mapping[str, Any]) -> tuple[str, set[str]]:
    """`{key}` by its value, also inside values, and the keys that were used. Unknown keys stay."""
    used: set[str] = set()
    size = 0

    def value(match: re.Match[str]) -> str:
        nonlocal size
        if match[1] not in values:
            return match[0]
        used.add(match[1])
        found = str(values[match[1]])
        size += len(found)
        if size > LONGEST:
            raise CommandError(f"with its templates filled in it is longer than {LONGEST:,} characters")
        return found

    for _ in range(DEEPEST):
        filled = _KEY.sub(value, text)
        if filled == text:
            break
        text = filled
    return text, used


def fill_format(text: str, values: Mapping[str, Any]) -> tuple[str, set[str]]:
    """As Python's str.format fills in plain names: `{key}` by its value once, `{{` and `}}` as braces."""
    used: set[str] = set()
    parts: list[str] = []
    position, size = 0, 0
    for match in re.finditer(r"\{\{|\}\}|\{([^{}]*)\}|[{}]", text):
        parts.append(text[position : match.start()])
        position = match.end()
        if match[0] in ("{{", "}}"):
            parts.append(match[0][0])
            continue
        name = match[1]
        if name is None or not _KEY.fullmatch(match[0]):
            raise CommandError(f"{match[0]!r} is no {{key}}; a brace of its own is written twice")
        if name not in values:
            raise CommandError(f"the key {{{name}}} has no value in defaults")
        used.add(name)
        parts.append(str(values[name]))
        size += len(parts[-1])
        if size > LONGEST:
            raise CommandError(f"with its templates filled in it is longer than {LONGEST:,} characters")
    return "".join([*parts, text[position:]]), used


def take_apart(text: str) -> Serving:
    """The parts of a command. Raises CommandError if it does not run `vllm serve`."""
    parts = statements(_CONTINUED.sub(" ", text.strip()))
    for number, (statement, _) in enumerate(parts):
        words = _words(statement)
        start = _serving(words)
        if start is None:
            continue
        found = Serving()
        found.before = _before(parts[:number], found)
        _wrapping(words[:start], found)
        _arguments(_without_redirections(words[start:], found), found)
        for later, _ in parts[number + 1 :]:
            found.problems.append((later, "it stands after the engine's command"))
        return found
    first = parts[0][0] if parts else ""
    raise CommandError(f"it does not run `vllm serve` but `{first[:60]}`; only recipes for vLLM can be imported")


def statements(text: str) -> list[tuple[str, str]]:
    """A script as statements with the operator that follows each. Comments are left out."""
    found: list[tuple[str, str]] = []
    start = position = depth = 0
    here: list[str] = []

    def end(operator: str) -> None:
        statement = "".join(here).strip()
        if statement:
            found.append((statement, operator))
        here.clear()

    while position < len(text):
        c = text[position]
        start = position
        if c == "\\":
            position += 2
        elif c in "'\"":
            position = _closing(text, position) + 1
        elif c == "#" and (position == 0 or text[position - 1] in " \t\n;&|"):
            position = text.find("\n", position)
            position = len(text) if position < 0 else position
            continue
        elif c in "()":
            depth += 1 if c == "(" else -1
            position += 1
        elif c in "\n;&|" and depth <= 0 and not (c == "&" and _redirects(text, position)):
            operator = text[position : position + 2] if text[position : position + 2] in ("&&", "||") else c
            position += len(operator)
            end(operator)
            continue
        else:
            position += 1
        here.append(text[start:position])
    end("")
    return found


def _redirects(text: str, position: int) -> bool:
    return text[position - 1 : position] in ("<", ">") or text[position + 1 : position + 2] == ">"


def _closing(text: str, position: int) -> int:
    quote = text[position]
    at = position + 1
    while at < len(text) and text[at] != quote:
        at += 2 if text[at] == "\\" and quote == '"' else 1
    if at >= len(text):
        raise CommandError(f"a quote ({quote}) is not closed")
    return at


@dataclass(frozen=True)
class Word:
    """As it stands in the script, and what a shell makes of it."""

    raw: str
    value: str

    @property
    def needs_shell(self) -> bool:
        """Whether only a shell could tell its value. Between single quotes, and behind a backslash, a $ is a
        character like others."""
        return bool(_NEEDS_SHELL.search(_QUOTED.sub(lambda found: _ESCAPED.sub(" ", found[1] or " "), self.raw)))


def _words(statement: str) -> list[Word]:
    """The words of a statement. A redirection is a word of its own, also where it touches another."""
    raw: list[str] = [""]
    position = 0
    while position < len(statement):
        c = statement[position]
        start = position
        if c == "\\":
            position += 2
        elif c in "'\"":
            position = _closing(statement, position) + 1
        else:
            position += 1
        if c.isspace():
            raw.append("")
        elif c in "<>" and not re.fullmatch(r"\d*|&|[<>]", raw[-1]):
            raw.append(c)
        else:
            raw[-1] += statement[start:position]
    try:
        return [Word(word, "".join(shlex.split(word))) for word in raw if word]
    except ValueError as error:
        raise CommandError(str(error).lower()) from None


def _serving(words: list[Word]) -> int | None:
    """Where the arguments of the server begin."""
    for at, (word, following) in enumerate(pairwise(words)):
        if word.value.rpartition("/")[2] == "vllm" and following.value == "serve":
            return at + 2
        if word.value == "-m" and following.value == _MODULE:
            return at + 2
    return None


def _before(parts: list[tuple[str, str]], found: Serving) -> str:
    """What runs before, as a script; plain `export KEY=VALUE` goes to the environment."""
    script = ""
    for statement, operator in parts:
        words = _words(statement) if statement.startswith("export ") else []
        assigned = [_ASSIGNED.fullmatch(word.value) for word in words[1:]]
        if assigned and all(assigned) and not any(word.needs_shell for word in words):
            found.env.update({match[1]: match[2] for match in assigned if match})
            continue
        script += statement + (f" {operator} " if operator in ("&&", "||", "|", "&") else "\n")
    script = re.sub(r"(&&|\|\|)\s*\Z", "", script).strip()
    if script:
        said = "shell steps run in shells of their own: a folder, variables or an environment they set end with them"
        found.problems.append((script, said))
    return script


def _wrapping(words: list[Word], found: Serving) -> None:
    """What precedes `vllm serve` in its own statement: assignments, exec, or a program that starts it."""
    for word in words[:-2]:
        assigned = _ASSIGNED.fullmatch(word.value)
        if assigned and not word.needs_shell:
            found.env[assigned[1]] = assigned[2]
        elif word.value not in ("exec", "env", "python", "python3"):
            found.problems.append((word.raw, "it starts the engine's command"))


def _without_redirections(words: list[Word], found: Serving) -> list[Word]:
    kept: list[Word] = []
    target = False  # the next word is the file of a redirection
    for word in words:
        redirection = _REDIRECTED.fullmatch(word.raw)
        if target or redirection:
            found.problems.append((word.raw, "the engine's output goes to the service's log"))
            target = bool(redirection and not redirection[1])
        else:
            kept.append(word)
    return kept


def _arguments(words: list[Word], found: Serving) -> None:
    """The model stands first or after --model; arguments that need a shell are reported with their option."""
    if words and not words[0].value.startswith("-") and not words[0].needs_shell:
        found.model = words.pop(0).value
    options: list[list[Word]] = []
    for word in words:
        if not options or (word.value.startswith("-") and not _NUMBER.fullmatch(word.value)):
            options.append([])
        options[-1].append(word)
    for option in options:
        if any(word.needs_shell for word in option):
            raw = " ".join(word.raw for word in option)
            found.problems.append((raw, "only a shell knows the value of its variable or command"))
        elif option[0].value == "--model" and len(option) == 2:
            found.model = option[1].value
        else:
            found.arguments += [word.value for word in option]
