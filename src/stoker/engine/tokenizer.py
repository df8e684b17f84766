"""Text to token ids and back, and the chat template, through transformers. Imported only where text is handled."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.engine.text import TextStream
from stoker.errors import RequestError, TokenizerError

FILES = ("tokenizer.json", "tokenizer_config.json")


class Tokenizer:
    def __init__(self, directory: Path) -> None:
        if not any((directory / name).exists() for name in FILES):
            raise TokenizerError(
                f"{directory} has no tokenizer: expected {' or '.join(FILES)}. "
                "Copy the tokenizer files of the original model into it."
            )
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises whatever its parsers raise
            reason = str(error).split("\n")[0]
            raise TokenizerError(f"the tokenizer in {directory} cannot be read: {reason}") from error
        self._directory = directory

    def encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half a character, as undecodable bytes of a command line become
            found = f"character {error.start + 1} is {text[error.start]!r}"
            raise RequestError(f"the text cannot be encoded as UTF-8: {found}. Give it as UTF-8.") from None
        # of the ways to encode, the one that lets other threads go on meanwhile
        (found,) = self.backend.encode_batch_fast([text], add_special_tokens=False)
        return list(found.ids)

    def encode_chat(self, messages: list[dict[str, Any]], begin_answer: bool = True, **options: Any) -> list[int]:
        """Token ids of a conversation, up to where the assistant's next turn begins, or without its beginning.

        `options` are the template's own, such as enable_thinking.
        """
        return self.encode(self.chat_text(messages, begin_answer, **options))

    def chat_text(self, messages: list[dict[str, Any]], begin_answer: bool = True, **options: Any) -> str:
        """A conversation as the chat template prints it."""
        if not self._tokenizer.chat_template:
            raise TokenizerError(
                f"{self._directory} has no chat template; add chat_template.jinja, or use generate without --chat."
            )
        return str(
            self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begin_answer, **options)
        )

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
