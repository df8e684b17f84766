"""The chat template without a tokenizer around it: renders conversations for training and evaluation.

The environment is the one transformers renders templates in; a test holds the two against each other.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE = Path(__file__).with_name("chat_template.jinja")


@cache
def _template() -> Template:
    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def render(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    enable_thinking: bool | None = None,
) -> str:
    switch = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    return _template().render(
        messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt, **switch
    )


def prompt_of(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    """What the model is given to answer `messages` with thinking disabled."""
    return render(messages, tools, add_generation_prompt=True, enable_thinking=False)
