"""A command is taken apart without a shell: words as a shell would make them, and what needs one is reported."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.recipes.formats.command import LONGEST, CommandError, Word, fill, fill_format, statements, take_apart


def test_arguments_over_lines_in_quotes_and_with_comments():
    found = take_apart(
        "#!/bin/bash\n"
        "# the server\n"
        "vllm serve org/model \\ \n"
        '  --json \'{"a": "b # c; d",\n "e": 1}\' \\\n'
        '  --text "x \\"y\\"" --path=/a\\ b  # the end\n'
    )
    assert found.model == "org/model"
    assert found.arguments == ["--json", '{"a": "b # c; d",\n "e": 1}', "--text", 'x "y"', "--path=/a b"]
    assert not found.problems
    assert not found.before


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve m --x 1",
        "exec /opt/bin/vllm serve m --x 1",
        "python3 -m vllm.entrypoints.openai.api_server --model m --x 1",
        "vllm serve --x 1 --model m",
    ],
)
def test_ways_to_start_the_server(command):
    found = take_apart(command)
    assert (found.model, found.arguments) == ("m", ["--x", "1"])
    assert not found.problems


def test_the_environment_before_the_command():
    found = take_apart("export A=1 B='x y'\nexport C=$HOME\nD=4 E=\"$F\" vllm serve m")
    assert found.env == {"A": "1", "B": "x y", "D": "4"}
    assert found.before == "export C=$HOME"
    assert [what for what, _ in found.problems] == ["export C=$HOME", 'E="$F"']


def test_what_stands_around_the_command_is_reported():
    found = take_apart("cd /x && nice -n 5 vllm serve m --x $Y --z '$Z' --n -1 > log 2>&1 | tee a; echo done &")
    assert found.before == "cd /x"
    assert found.arguments == ["--z", "$Z", "--n", "-1"]
    assert [what for what, _ in found.problems] == [
        "cd /x",
        "nice",
        "-n",
        "5",
        ">",
        "log",
        "2>&1",
        "--x $Y",
        "tee a",
        "echo done",
    ]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("", "does not run `vllm serve`"),
        ("llama-server -m x", "but `llama-server -m x`"),
        ("vllm bench serve", "does not run"),
        ("vllm serve 'm", "a quote (') is not closed"),
        ('vllm serve "m\\"', 'a quote (") is not closed'),
        ("vllm serve m \\", "no escaped character"),
    ],
)
def test_what_cannot_be_taken_apart(command, says):
    with pytest.raises(CommandError) as raised:
        take_apart(command)
    assert says in str(raised.value)


def test_statements_keep_what_is_in_brackets_together():
    assert statements("a $(b; c) && (d\ne) || f;;g") == [
        ("a $(b; c)", "&&"),
        ("(d\ne)", "||"),
        ("f", ";"),
        ("g", ""),
    ]


@pytest.mark.parametrize(
    ("raw", "needs"),
    [
        ("'$A'", False),
        ("\\$A", False),
        ('"\\$A"', False),
        ("''\"'\"'`'", False),
        ('"$A"', True),
        ("\"'$A'\"", True),
        ("'a'$B", True),
        ("`date`", True),
    ],
)
def test_a_dollar_counts_where_a_shell_would_look_at_it(raw, needs):
    assert Word(raw, "").needs_shell == needs


@given(st.lists(st.text(min_size=1).filter(lambda text: "\0" not in text), max_size=5))
def test_quoted_words_come_out_as_they_went_in(words):
    written = shlex.join(words).replace("\\\n", "")
    expected = shlex.split(written)
    found = take_apart(f"vllm serve m --words {written}")
    assert found.arguments == ["--words", *expected]


def test_templates_are_filled_in_also_inside_values():
    assert fill("{a} {b} {c} {{a}}", {"a": "{b}", "b": 1}) == ("1 1 {c} {1}", {"a", "b"})
    assert fill_format("{a} {{x}} {b}", {"a": "{b}", "b": 2}) == ("{b} {x} 2", {"a", "b"})


@pytest.mark.parametrize("text", ["{a.b}", "{a[0]}", "{a!r}", "{}", "{a:>10}", "{", "}", "{none}"])
def test_formats_beyond_plain_names_are_refused(text):
    with pytest.raises(CommandError):
        fill_format(text, {"a": 1})


def test_templates_that_explode_are_refused():
    values = {"a": "x" * 1000}
    with pytest.raises(CommandError, match="longer than"):
        fill("{a}" * (LONGEST // 1000 + 1), values)
    with pytest.raises(CommandError, match="longer than"):
        fill_format("{a}" * (LONGEST // 1000 + 1), values)
    with pytest.raises(CommandError, match="longer than"):
        fill("{a}", {"a": "{b}" * 50, "b": "{c}" * 50, "c": "{d}" * 50, "d": "y"})
    assert fill("{a}", {"a": "{b}", "b": "{a}"})[0] in ("{a}", "{b}"), "a circle ends"
