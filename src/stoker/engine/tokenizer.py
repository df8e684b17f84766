"""Text to token ids and back, through transformers, and the chat template. Imported only where text is handled."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.engine.text import TextStream
from stoker.engine.text_pieces import TextPieces
from stoker.errors import ConfigError, RequestError, TokenizerError
from stoker.weights.json_file import read_json, read_small

FILES = ("tokenizer.json", "tokenizer_config.json")
TEMPLATE = "chat_template.jinja"
OBJECTS = (*FILES, "special_tokens_map.json", "added_tokens.json", "config.json")
OTHERS = (TEMPLATE, "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model")


class Tokenizer:
    def __init__(self, directory: Path) -> None:
        if not any((directory / name).exists() for name in FILES):
            raise TokenizerError(
                f"{directory} has no tokenizer: expected {' or '.join(FILES)}. "
                "Copy the tokenizer files of the original model into it."
            )
        _check_files(directory)
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises whatever its parsers raise
            _check_objects(directory)
            reason = str(error).split("\n")[0]
            raise TokenizerError(f"the tokenizer in {directory} cannot be read: {reason}") from error
        self._directory = directory
        self._pieces = TextPieces(self.backend)

    def encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half a character, as undecodable bytes of a command line become
            found = f"character {error.start + 1} is {text[error.start]!r}"
            raise RequestError(f"the text cannot be encoded as UTF-8: {found}. Give it as UTF-8.") from None
        return self._pieces.encode(text)

    def encode_chat(self, messages: list[dict[str, Any]], begin_answer: bool = True, **options: Any) -> list[int]:
        """Token ids of a conversation, up to where the assistant's next turn begins, or without its beginning.

        `options` are the template's own, such as enable_thinking.
        """
        return self.encode(self.chat_text(messages, begin_answer, **options))

    def chat_text(self, messages: list[dict[str, Any]], begin_answer: bool = True, **options: Any) -> str:
        """A conversation as the chat template prints it. Raises TokenizerError where it does not, in time.

        Templates are given what transformers gives them, tools and documents always among it.
        """
        from stoker.engine.chat_template import rendered

        if not messages:
            raise RequestError("the conversation is empty; a chat template needs at least one message.")
        variables = {"tools": None, "documents": None, **self._tokenizer.special_tokens_map, **options}
        variables |= {"messages": messages, "add_generation_prompt": begin_answer}
        file = TEMPLATE if (self._directory / TEMPLATE).exists() else "tokenizer_config.json"
        return rendered(self._template(variables["tools"] is not None), file, variables)

    def _template(self, tools: bool) -> str:
        """Its source. Some models have several by name, one of them for tools."""
        found = self._tokenizer.chat_template
        if isinstance(found, dict):
            found = found.get("tool_use" if tools and "tool_use" in found else "default")
        if not found:
            raise TokenizerError(
                f"{self._directory} has no chat template; add {TEMPLATE}, or use generate without --chat."
            )
        if not isinstance(found, str):
            kind = type(found).__name__
            raise TokenizerError(f"{self._directory}: the chat template is of type {kind}, expected text.")
        return found

    @property
    def chat_template(self) -> str | None:
        """Its source; None if there is none."""
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else None

    @property
    def backend(self) -> Any:
        """The `tokenizers` object behind it, which the engine finds stop strings with."""
        return self._tokenizer.backend_tokenizer

    def stream(self, stops: Sequence[str] = ()) -> TextStream:
        """Turns token ids into text one by one, up to a stop string."""
        return TextStream(self.backend, stops)

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def _check_files(directory: Path) -> None:
    """transformers passes over what is no regular file, and reads files of any size."""
    others = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    for path in (*(directory / name for name in OBJECTS + OTHERS), *others):
        if path.exists():
            try:
                read_small(path)
            except OSError as error:
                raise TokenizerError(f"{path} cannot be read: {error.strerror}.") from None


def _check_objects(directory: Path) -> None:
    """Names the file that is broken, where its JSON is."""
    for path in (directory / name for name in OBJECTS):
        if path.exists():
            try:
                read_json(path)
            except ConfigError as error:
                raise TokenizerError(str(error)) from error
