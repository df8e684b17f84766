"""What a user can get wrong. Each message is one sentence (or two) with the numbers in it and the way out.

The CLI prints these without a traceback and exits with 2; anything else is a bug and keeps its traceback.
"""

import reprlib
import unicodedata
from typing import Any


def visible(text: str, keep: str = "\n") -> str:
    """`text` with every character that a terminal obeys, or that cannot be printed, as an escape such as \\x1b.

    Names and values out of files end up in messages: control and format characters (writing direction included),
    halves of surrogate pairs, and line breaks other than those in `keep`.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(c) if c not in keep and unicodedata.category(c) in _OBEYED else c for c in text)


_OBEYED = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlist = _SHORT.maxdict = 4


def brief(value: Any) -> str:
    """`value` as Python writes it, with an ellipsis for most of what is long: files hold values of any size."""
    return visible(_SHORT.repr(value), keep="")


class StokerError(Exception):
    """Base of all mistakes a user can mend. Its message is safe to print."""

    def __init__(self, message: str = "") -> None:
        super().__init__(visible(message))


class ConfigError(StokerError):
    """A config.json that cannot be read, or that asks for something Stoker does not compute."""


class CheckpointError(StokerError):
    """Weights that are missing, cut short, of the wrong shape, or in a form Stoker refuses to open."""


class TokenizerError(StokerError):
    """A directory without a usable tokenizer or chat template."""


class RequestError(StokerError):
    """A request that cannot be served as asked."""


class BenchError(StokerError):
    """A server that cannot be measured as asked, or a result file that cannot be read."""


class DependencyError(StokerError):
    """A command that needs an extra which is not installed."""


class EngineError(StokerError):
    """An engine that died, failed in a step or was shut down. Its requests are lost; it can be started again."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details  # a traceback, where there is one
