"""A conversation whose last message, the assistant's, is left open so that the model goes on with it."""

import re
from collections.abc import Callable
from typing import Any

from stoker.server.errors import ApiError
from stoker.server.output.reasoning import CLOSE, OPEN

END = "f3a91c7e5d024b68"  # stands where the message ends; templates trim white space, but not this
EMPTY_THOUGHT = re.compile(rf"{OPEN}\s*{CLOSE}\s*\Z")

Message = dict[str, Any]


def open_ended(messages: list[Message], printed: Callable[[list[Message]], str]) -> str:
    """The text of a conversation up to the last character of its last message, white space included.

    `printed` is the template. What it writes behind a message is cut off, and so is the empty thought it writes before
    an answer that brings its own. Without an answer, the thought is what goes on.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        raise ApiError(
            400,
            f"continue_final_message needs the last message to be the assistant's; it is of role {last['role']!r}.",
            param="continue_final_message",
        )
    if last.get("tool_calls"):
        raise ApiError(400, "A message with tool calls is complete and cannot be continued.", param="messages")
    place = "content" if last["content"] or not last.get("reasoning_content") else "reasoning_content"
    before, found, _ = printed([*messages[:-1], {**last, place: END}]).rpartition(END)
    if not found:
        raise ApiError(400, f"The chat template leaves out the {place} of the last message, so it cannot be continued.")
    said = str(last[place])
    if said.lstrip().startswith(OPEN):
        before = EMPTY_THOUGHT.sub("", before)
    return before + said


def thinks_at_the_end(messages: list[Message]) -> bool:
    """Whether a message that is continued ends inside a thought."""
    last = messages[-1]
    if not last["content"] and last.get("reasoning_content"):
        return True
    return last["content"].lstrip().startswith(OPEN) and CLOSE not in last["content"]
