"""docs/formats.md shows numbers; this runs them."""

import re
from pathlib import Path

from stoker.weights.formats import FORMATS

DOCS = Path(__file__).parents[3] / "docs" / "formats.md"


def test_examples_in_the_docs_run():
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 8
    exec(compile("\n".join(blocks), str(DOCS), "exec"), {})


def test_every_format_is_documented():
    text = DOCS.read_text(encoding="utf-8")
    assert [name for name in FORMATS if f"`{name}`" not in text] == []
