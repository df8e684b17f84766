"""Chat templates are programs that come with a checkpoint, so they run in children with limits on time and memory.

`rendered` is called here; `render` runs in the child, which loads jinja but neither torch nor transformers. What a
template may use is what transformers gives it, so that the same conversation gives the same text.
"""

import json
import pickle
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from stoker import sandbox
from stoker.errors import TokenizerError

RENDER_S = 5.0  # published templates take milliseconds
WAIT_S = 3.0  # for a child to be free
MEMORY = 256 * 2**20  # bytes
OWN_TEXT, TIMES_INPUT = 2**20, 4  # characters that a template may print: its own, and per byte of the conversation
ADVICE = "Shorten the conversation, or correct the template."
REASONING = ("reasoning_content", "thinking", "reasoning")  # the names templates know a message's reasoning by

_children = sandbox.Sandbox(processes=2, memory=MEMORY)


class Refused(TokenizerError):
    """The template raised an exception for this conversation; others may be fine."""


def rendered(template: str, file: str, variables: Mapping[str, Any]) -> str:
    """What a template prints. `file` is what messages call it; `variables` are plain data, messages and tools included.

    Raises TokenizerError, or sandbox.Busy where too many conversations are being rendered.
    """
    try:
        return str(_children.call(render, template, pickle.dumps(dict(variables)), timeout=RENDER_S, wait=WAIT_S))
    except sandbox.TimeLimit:
        reason = f"{file} took more than the {RENDER_S:g} s that it may take. {ADVICE}"
    except sandbox.MemoryLimit:
        reason = f"{file} needs more than the {MEMORY >> 20} MiB of memory that it may take. {ADVICE}"
    except sandbox.Crashed:
        reason = f"{file} ended the process that ran it. {ADVICE}"
    except sandbox.Failed as failure:
        if failure.kind == TooMuchText.__name__:
            reason = f"{file} {failure} {ADVICE}"
        elif failure.kind == NotATemplate.__name__:
            reason = f"{file} is no template that jinja can read: {failure} Correct it, or fetch the file again."
        else:
            raise Refused(_sentence(str(failure) or failure.kind)) from failure
    raise TokenizerError(_sentence(reason))


def _sentence(reason: str) -> str:
    return f"The chat template cannot render this conversation: {reason}"


# -- in the child


class TooMuchText(ValueError):
    """The template printed more than the conversation explains."""


class NotATemplate(ValueError):
    """It could not be compiled."""


def render(template: str, packed: bytes) -> str:
    variables = pickle.loads(packed)
    variables["messages"] = [_with_reasoning(message) for message in variables["messages"]]
    text = _compiled(template).render(variables)
    most = OWN_TEXT + TIMES_INPUT * len(packed)
    if len(text) > most:
        raise TooMuchText(f"printed {len(text):,} characters of this conversation, and at most {most:,} are taken.")
    return text


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    said = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if said is None else {"thinking": said, **message, "reasoning_content": said}


@lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    try:
        return _environment().from_string(template)
    except TemplateSyntaxError as error:
        raise NotATemplate(f"line {error.lineno}: {(error.message or '').rstrip('.')}.") from error
    except SyntaxError as error:  # Python's own, about the code that jinja made of it
        raise NotATemplate(f"{error.msg}.") from error
    except RecursionError as error:
        raise NotATemplate("it is nested too deeply.") from error


def _environment() -> ImmutableSandboxedEnvironment:
    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    found.filters["tojson"] = _to_json
    found.globals |= {"raise_exception": _raise, "strftime_now": _now, "dict": Dicts(), "namespace": PlainNamespace}
    return found


class GenerationTag(Extension):
    """{% generation %} marks answers to be trained on; here its body is printed and nothing else."""

    tags = {"generation"}  # noqa: RUF012  (as jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_printed"), [], [], body).set_lineno(line)

    def _printed(self, caller: Macro) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own, which escapes what HTML would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


class Dicts:
    """Stands for Python's dict, whose own attributes a template should not reach."""

    def __call__(self, *pairs: Any, **named: Any) -> dict[Any, Any]:
        return dict(*pairs, **named)

    def fromkeys(self, *keys: Any) -> dict[Any, Any]:
        return dict.fromkeys(*keys)


class PlainNamespace(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*args: Any, **named: Any) -> None:  # so that a namespace may have an attribute called self
        self, *pairs = args
        found = dict(*pairs, **named)
        for name in found:
            _refuse_private(name)
        Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have {name!r}: names that begin with an underscore are not allowed.")
