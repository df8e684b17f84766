"""The embedded model: small, trained, of the real architecture, in the formats it would be served in.

MODEL_CARD.md beside this file says what it was made of and what it can do. No torch.
"""

import json
from functools import cache
from pathlib import Path

NAME = "demo"  # what every command takes in place of a checkpoint directory
EMBEDDED = Path(__file__).parent / "model"


def checkpoint_at(model: str) -> Path:
    """The directory a command was given, or that of the embedded model; a folder called demo is written ./demo."""
    return EMBEDDED if model == NAME else Path(model)


@cache
def prompts() -> dict[str, list[str]]:
    """Prompts by kind of text (JSON, agent, code, prose), none of them seen in training; written by
    training/prompts.py, special tokens spelled out."""
    found: dict[str, list[str]] = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
    return found
