"""Numbers of tokens as people write them: `--context 128k`."""

import re
from typing import Any

from stoker.errors import RequestError

SCALES = {"": 1, "k": 1 << 10, "m": 1 << 20}
MOST = 1 << 30


def tokens(text: str, option: str = "--context") -> int:
    """131072, 131,072, 128k (131,072) or 1m. `option` is named if `text` is none of them."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([km]?)", text.strip().lower().replace(",", "").replace("_", ""))
    count = float(found[1]) * SCALES[found[2]] if found else 0.0
    if not found or not 1 <= count <= MOST or count != int(count):
        raise RequestError(f"{option} {text} is no number of tokens; write 131072 or 128k.")
    return int(count)


def context(text: Any) -> int:
    """The parser of a `--context` option. Its default, a number, comes through it too."""
    return tokens(str(text))
