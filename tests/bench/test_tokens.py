"""Counting tokens with a tokenizer file."""

from pathlib import Path

import pytest

from stoker.bench.target import Target
from stoker.bench.tokens import TokenizerFile
from stoker.errors import BenchError


@pytest.mark.parametrize("content", ["garbage", "{}", "[" * 1_000_000, ""])
def test_a_tokenizer_file_that_is_none_is_refused_in_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BenchError, match=r"tokenizer\.json cannot be read: "):
        TokenizerFile(tmp_path, Target("http://127.0.0.1:9"))
