"""`--context 128k` wherever a number of tokens is asked for."""

import pytest
from typer.testing import CliRunner

from stoker.cli.counts import tokens
from stoker.cli.main import app
from stoker.errors import RequestError


@pytest.mark.parametrize(
    ("written", "count"),
    [("131072", 131072), ("131,072", 131072), ("128k", 131072), ("128K", 131072), ("1m", 1 << 20), ("0.5k", 512)],
)
def test_tokens_are_read_as_people_write_them(written: str, count: int) -> None:
    assert tokens(written) == count


@pytest.mark.parametrize("written", ["", "many", "128kb", "-1", "0", "1.5", "1..5k", "9999999m"])
def test_what_is_no_number_of_tokens_is_refused_with_an_example(written: str) -> None:
    with pytest.raises(RequestError, match=r"--context .*write 131072 or 128k"):
        tokens(written)


@pytest.mark.parametrize(
    "command",
    [
        ("serve", "--model", "demo"),
        ("chat", "--model", "demo"),
        ("plan", "122b", "--box", "spark"),
        ("bench", "http://127.0.0.1:9"),
        ("check", "http://127.0.0.1:9"),
    ],
    ids=lambda command: command[0],
)
def test_every_command_with_a_context_reads_it_so(command: tuple[str, ...]) -> None:
    failed = CliRunner().invoke(app, [*command, "--context", "wide"])
    assert isinstance(failed.exception, RequestError)
    assert str(failed.exception) == "--context wide is no number of tokens; write 131072 or 128k."
