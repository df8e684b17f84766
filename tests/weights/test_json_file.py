"""The JSON files of a checkpoint: whatever lies there instead is a sentence that is safe to print, and at once."""

import os
from pathlib import Path

import pytest

from stoker.errors import ConfigError, visible
from stoker.weights.json_file import read_json


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 300 + "1" + "}" * 300, '{"a": ' + "9" * 5000 + "}"])
def test_deep_nesting_and_endless_numbers_are_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"nested more than|digits"):
        read_json(tmp_path / "config.json")


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="it is a named pipe"):
        read_json(tmp_path / "config.json")


def test_errors_show_what_a_terminal_would_obey() -> None:
    assert str(ConfigError("a\x1b[2Jb\u202ec\ud800")) == "a\\x1b[2Jb\\u202ec\\ud800"
    assert visible("Überraschung\n") == "Überraschung\n"
