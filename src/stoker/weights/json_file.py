"""The JSON files of a checkpoint directory. No torch."""

import json
from pathlib import Path
from typing import Any

from stoker.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or a sentence that says what is wrong with the file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path} does not exist; a model directory holds config.json and *.safetensors.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise ConfigError(f"{path} is not valid JSON ({place}); fetch the file again.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); fetch it again.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a JSON {type(raw).__name__}, expected an object.")
    return raw
