"""YAML of strangers is read as plain data, within limits, or refused in a sentence with the line."""

import pytest

from stoker.recipes.formats.yaml_file import LARGEST, parse, read
from stoker.recipes.load import RecipeError

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"a: 1\nb: \xff\n", "line 2: the file is not UTF-8"),
        (b"a: 1\nb: [1, 2\nc: 3\n", "line 3: while parsing a flow sequence"),
        (b"a: 1\n\tb: 2\n", "line 2: while scanning"),
        (b"a: 1\na: 2\n", "line 2: the key 'a' is there twice"),
        (b"a: \x07\n", "line 1: the character"),
        (b"a: !!python/object/apply:os.system [id]\n", "line 1: values of the kind 'tag:yaml.org,2002:python"),
        (b"a: !mine x\n", "values of the kind '!mine' are not read"),
        (b"a: !!binary aGk=\n", "are not read"),
        (b"a: *nowhere\n", "line 1: found undefined alias"),
        (b"a: {<<: {b: 1}}\n", "line 1: a key is a word"),
        (b"? [1, 2]\n: 3\n", "line 1: a key is a word"),
        (b"a: !!int x\n", "'x' cannot be read as a value"),
        (b"a: " + b"9" * 5000 + b"\n", "cannot be read as a value"),
        (b"a: " + b"[" * 100 + b"\n", "line 1: its values are nested deeper than 32 levels"),
        (b"a:\n" + b"- " * 60 + b"x\n", "line 2: its values are nested deeper than 32 levels"),
        (b"a: &a [*a]\n", "its aliases make more than"),
        (b"x: [" + b"1," * 30_000 + b"]\n", "line 1: it has more than 20,000 values"),
        (BOMB.encode(), "its aliases make more than 20,000 values"),
        (b"a: 1\n---\nb: 2\n", "line 2: expected a single document"),
        (b"", "line 1: a recipe is a table of keys and values"),
        (b"- a\n", "not a list, ['a']"),
        (b'a: "\\uD800"\n', "line 1: the text has characters that cannot be written"),
        (b'a: "x\\0y"\n', "line 1: the text has characters that cannot be written"),
        (b'"a\\0": 1\n', "line 1: the text has characters that cannot be written"),
        (b"a: 1\n" + b"#" * LARGEST, "is larger than 262,144 bytes"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_line(data, says):
    with pytest.raises(RecipeError) as raised:
        parse(data, "theirs.yaml")
    assert str(raised.value).startswith("theirs.yaml")
    assert says in str(raised.value)


def test_plain_values_dates_as_they_are_written_and_aliases():
    data = b"\xef\xbb\xbfa: &a [1, 2.5, yes, null]\nb: *a\nc: 2026-04-22\nd: |\n  x\n  y\n1: on\n"
    table = parse(data, "theirs.yaml")
    values = [1, 2.5, True, None]
    assert table.values == {"a": values, "b": values, "c": "2026-04-22", "d": "x\ny\n", "1": True}


def test_a_table_knows_what_nobody_asked_for():
    table = parse(b"a: 1\nb: {c: 2, d: 3}\ne: []\nf: null\ng: x\n", "theirs.yaml")
    assert table.integer("a") == 1
    inner = table.table("b")
    inner.take("d")
    assert (table.unread(), inner.unread()) == (["g"], ["c"])
    assert inner.error("c", "no.").args[0] == "theirs.yaml, line 2 (b.c): no."


def test_files_that_are_not_there_or_not_files(tmp_path):
    with pytest.raises(RecipeError, match="is not a file"):
        read(tmp_path)
    with pytest.raises(RecipeError, match="is not a file"):
        read(tmp_path / "none.yaml")
    (tmp_path / "a.yaml").write_text("a: 1\n")
    assert read(tmp_path / "a.yaml").values == {"a": 1}
