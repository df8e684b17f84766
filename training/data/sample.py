"""What a generator makes: a conversation or a plain text, and the three splits it may belong to."""

from dataclasses import dataclass, field
from typing import Any, Literal

# train: what the model learns from. known: new instances of layouts, schemas and tools that training has.
# unseen: layouts, labels, schemas and tools whose names training never contains.
Split = Literal["train", "known", "unseen"]

Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """A conversation that ends with the assistant's turn; tool calls are dicts of name and arguments."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Text:
    text: str


Sample = Chat | Text


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def calls(*wanted: tuple[str, dict[str, Any]], content: str = "") -> Message:
    """An assistant turn that calls tools."""
    items = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in wanted]
    return {"role": "assistant", "content": content, "tool_calls": items}


def tool(content: str) -> Message:
    return {"role": "tool", "content": content}
