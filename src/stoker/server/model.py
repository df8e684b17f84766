"""The model as requests see it: its names, its context, its tokenizer and its chat template."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stoker.engine.chat_template import Refused
from stoker.engine.prefix_cache import message_boundaries
from stoker.engine.text import TextStream
from stoker.engine.tokenizer import Tokenizer
from stoker.errors import ConfigError, StokerError, TokenizerError
from stoker.sampling.settings import SAMPLED, is_usable
from stoker.sandbox import Busy
from stoker.server.errors import RETRY_S, ApiError
from stoker.server.output.answer import CLOSE, OPEN
from stoker.weights.json_file import read_json
from stoker.weights.model_config import ModelConfig

MESSAGE_START = "<|im_start|>"
# template variables that the server sets itself
RESERVED = {
    "messages",
    "chat_template",
    "tools",
    "begin_answer",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
}

END_MARK = "f3a91c7e5d024b68"  # marks the end of a message: templates trim white space, but not this
EMPTY_THOUGHT = re.compile(rf"{OPEN}\s*{CLOSE}\s*\Z")

Message = dict[str, Any]


@contextmanager
def _without_torch() -> Iterator[None]:
    """transformers imports torch wherever it finds it, which takes longer than all else that a server imports. What is
    imported inside does not find it, unless somebody has imported it already."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch
    try:
        yield
    finally:
        del sys.modules["torch"]


class ServedModel:
    def __init__(
        self,
        directory: Path,
        names: Sequence[str],
        context: int,
        options: Mapping[str, Any],
        any_name: bool = False,
        sampling: Mapping[str, float] | None = None,
    ) -> None:
        """`options` are default variables of the chat template, such as enable_thinking, and `sampling` defaults of
        requests that go before those of generation_config.json. With `any_name`, requests may name any model."""
        self.directory, self.names, self.context, self._any_name = directory, tuple(names), context, any_name
        self.config = ModelConfig.load(directory)
        with _without_torch():
            self.tokenizer = Tokenizer(directory)
        self.stop_ids = self.config.eos_token_ids
        self.defaults = {**_generation_defaults(directory), **(sampling or {})}
        self._options = dict(options)
        self._backend = self.tokenizer.backend
        self._message_start = self._backend.token_to_id(MESSAGE_START)
        template = self.tokenizer.chat_template
        self.has_template = template is not None
        self.calls_in_json = template is not None and "<function=" not in template
        self._texts: dict[int, str] = {}  # of single tokens, for logprobs
        if self.has_template:
            self._check_template()
            self._renders_later_system_messages = self._probe_later_system_messages()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def check_name(self, name: str | None) -> None:
        if name is not None and name not in self.names and not self._any_name:
            raise ApiError(
                404,
                f"There is no model {name[:200]!r} here; this server has {', '.join(map(repr, self.names))}. "
                "More names: --served-model-name; any name: --any-model.",
                param="model",
                code="model_not_found",
            )

    # -- text and tokens

    def encode(self, text: str) -> list[int]:
        check_text(text, "The text")
        return self.tokenizer.encode(text)

    def decode(self, tokens: Sequence[int], special: bool = True) -> str:
        return str(self._backend.decode_batch([list(tokens)], skip_special_tokens=not special)[0])

    def stream(self, stops: Sequence[str]) -> TextStream:
        return TextStream(self._backend, stops)

    def token_text(self, token: int) -> str:
        """The text of a single token; an incomplete character becomes the replacement character."""
        if token not in self._texts:
            self._texts[token] = self.decode([token])
        return self._texts[token]

    def token_id(self, text: str) -> int | None:
        """The id of the token that is exactly this text, or None."""
        found = self._backend.token_to_id(text)
        return None if found is None else int(found)

    # -- conversations

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        begin_answer: bool = True,
        options: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> list[int]:
        """Token ids of a conversation. An error raised by the template is reported as the request's fault (400).

        With `continue_final` the last message, the assistant's, is left open and the model continues it.
        """
        if not self.has_template:
            raise ApiError(
                400, f"{self.name} has no chat template, so it takes no conversations. Use /v1/completions instead."
            )
        given = {**self._options, **(options or {})}
        reserved = RESERVED & set(given)
        if reserved:
            raise ApiError(400, f"chat_template_kwargs may not set {', '.join(sorted(reserved))}.")

        def text_of(messages: list[dict[str, Any]]) -> str:
            return self.tokenizer.chat_text(messages, begin_answer and not continue_final, tools=tools, **given)

        if any(message["role"] == "system" for message in messages[1:]) and not self._renders_later_system_messages:
            messages = system_first(messages)
        try:
            return self.tokenizer.encode(open_ended(messages, text_of) if continue_final else text_of(messages))
        except Busy as error:
            raise ApiError(
                503, "Other conversations are being rendered. Try again soon.", code="busy", retry_after=RETRY_S
            ) from error
        except StokerError as error:
            raise ApiError(400, str(error)) from error
        except RecursionError as error:
            raise ApiError(400, "The conversation is nested too deeply for the chat template.") from error

    def _check_template(self) -> None:
        """Raises TokenizerError for a template that cannot render, or not in time. It may refuse this conversation."""
        try:
            self.tokenizer.chat_text([{"role": "user", "content": "question"}])
        except Refused:
            pass
        except TokenizerError as error:
            raise TokenizerError(
                f"the chat template of {self.directory} fails on a conversation of one word. {error} "
                "Without a template, the model is served on /v1/completions alone."
            ) from error

    def _probe_later_system_messages(self) -> bool:
        """Whether the template renders a system message in its place when other messages precede it."""
        system, user = {"role": "system", "content": "first"}, {"role": "user", "content": "question"}
        later = {"role": "system", "content": "later-instructions"}
        try:
            text = self.tokenizer.chat_text([system, user, later, user])
        except TokenizerError:
            return False
        return "question" in text.partition("later-instructions")[2]

    def boundaries(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Positions where messages begin: good places for snapshots of the prefix cache."""
        return () if self._message_start is None else tuple(message_boundaries(prompt, self._message_start))

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends with an opened thought, so that the answer begins inside it."""
        return self.decode(prompt[-8:]).rstrip().endswith(OPEN)


def system_first(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with all system messages joined into one at the beginning."""
    systems = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(systems)}, *others]


def open_ended(messages: list[Message], render: Callable[[list[Message]], str]) -> str:
    """The text of a conversation up to the last character of its last message, including white space.

    `render` renders the template. Its text after the message is cut off, and so is the empty thought that it writes
    before an answer that has a thought of its own. If the message has no answer yet, its thought is continued.
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
    field = "content" if last["content"] or not last.get("reasoning_content") else "reasoning_content"
    before, found, _ = render([*messages[:-1], {**last, field: END_MARK}]).rpartition(END_MARK)
    if not found:
        raise ApiError(400, f"The chat template leaves out the {field} of the last message, so it cannot be continued.")
    said = str(last[field])
    if said.lstrip().startswith(OPEN):
        before = EMPTY_THOUGHT.sub("", before)
    return before + said


def thinks_at_the_end(messages: list[Message]) -> bool:
    """Whether a continued message ends inside a thought."""
    last = messages[-1]
    if not last["content"] and last.get("reasoning_content"):
        return True
    return last["content"].lstrip().startswith(OPEN) and CLOSE not in last["content"]


def check_text(text: str, where: str) -> None:
    """Refuses text with an unpaired surrogate, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"half of a surrogate pair at character {error.start:,}"
        raise ApiError(400, f"{where} is not text: it has {half}.") from error


def _generation_defaults(directory: Path) -> dict[str, Any]:
    """The sampling defaults that the model's authors recommend, for what a request leaves open."""
    file = directory / "generation_config.json"
    found = read_json(file) if file.exists() else {}
    defaults = {name: found[name] for name in SAMPLED if found.get(name) is not None}
    for name, value in defaults.items():
        if not is_usable(value):
            raise ConfigError(f"{file}: {name} is no number that sampling can use. Correct it, or remove it.")
    return defaults
