"""Suites of one's own: the published example works as it is, and what is wrong is named with file and line."""

import json
from pathlib import Path

import pytest

from stoker.check import code_sandbox, own
from stoker.check.checkers import CHECKERS
from stoker.errors import BenchError
from tests.check.processes import check, served

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = DOCS / "examples" / "own-suite.jsonl"
RIGHT = {
    "capital": "It is Budapest.",
    "status": "ALARM",
    "ticket": "T-2041",
    "unit": "B",
    "greeting": "A kazánt azért kell évente ellenőrizni, mert a szennyeződés veszélyes. Az is fontos, hogy jól égjen.",
    "summary": "- They clog.\n- Air gets dirty.\n- Pumps work harder.",
    "function": "```python\ndef overdue(days, limit):\n    return sum(day > limit for day in days)\n```",
}


def test_the_example_has_every_checker_and_the_page_shows_lines_of_it():
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    assert {json.loads(line)["checker"] for line in lines} == set(CHECKERS)
    shown = [line for line in (DOCS / "check.md").read_text(encoding="utf-8").splitlines() if line.startswith('{"')]
    assert len(shown) >= 2
    assert set(shown) <= set(lines)


@pytest.mark.skipif(bool(code_sandbox.unavailable()), reason="code cannot be confined here")
def test_the_example_runs_as_it_is_and_tells_right_answers_from_wrong_ones(tmp_path: Path):
    def rows(answers: dict[str, str]) -> tuple[dict[str, float], str]:
        file = tmp_path / "result.json"
        with served(str(EXAMPLE), answers={f"own-suite/{name}": said for name, said in answers.items()}) as server:
            ran = check(server.url, "--suite", str(EXAMPLE), "--json", str(file), home=str(tmp_path))
        assert ran.returncode == 0, ran.stderr
        found = json.loads(file.read_text())
        return {row["measure"]: row["score"] for row in found["suites"]}, found["statement"]

    assert rows(RIGHT)[0] == {"passed": 1.0}
    wrong = dict.fromkeys(RIGHT, "This is wrong.")
    found, statement = rows({**RIGHT, "summary": "- One.\n- Two.", "status": wrong["status"]})
    assert found["passed"] == pytest.approx(0.8)
    assert found["parts"] == pytest.approx(0.85), "the summary kept one of its two rules"
    assert "own-suite 80%" in statement
    assert rows(wrong)[0]["passed"] == pytest.approx(0.3)


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_a_folder_is_a_suite_per_file_and_items_limits_each(tmp_path: Path):
    one = {"prompt": "x", "checker": "exact", "expect": "y"}
    write(tmp_path / "b.jsonl", one, "", one, one)
    write(tmp_path / "a.jsonl", {**one, "suite": "named", "id": "1"}, one)
    (tmp_path / "notes.txt").write_text("not an item")
    assert [item.id for item in own.items(tmp_path)] == ["named/1", "a/2", "b/1", "b/3", "b/4"]
    assert [item.suite for item in own.items(tmp_path, 2)] == ["named", "a", "b", "b"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2"),
        ({"checker": "exact", "expect": "y"}, "either a prompt or messages"),
        ({"prompt": "x", "checker": "telepathy", "expect": "y"}, "no checker 'telepathy'; there are exact"),
        ({"prompt": "x", "checker": "exact", "expect": "y", "promt": 1}, "unknown field `promt`"),
        ({"prompt": "x", "checker": "number", "expect": "12"}, "number expects a number"),
        ({"prompt": "x", "checker": "regex", "expect": "("}, "regex expects a regular expression"),
        ({"prompt": "x", "checker": "choice", "expect": "b"}, "a letter from A to J"),
        ({"prompt": "x", "checker": "rules", "expect": [{"rule": "words"}]}, "rules expects"),
        ({"prompt": "x", "checker": "rules", "expect": [{"rule": "rhyme"}]}, "rules expects"),
        ({"prompt": "x", "checker": "python", "expect": {"function": "f", "cases": []}}, "python expects"),
        ({"prompt": "x", "checker": "tool_calls", "expect": [{"name": "f"}]}, "with a name and arguments"),
        ({"prompt": "x", "checker": "tool_calls", "expect": [], "tools": [{"function": "f"}]}, "a tool is written"),
        ({"prompt": "x", "checker": "contains", "expect": []}, "a text or a list of texts"),
        ({"prompt": "x", "checker": "exact", "expect": "y", "max_tokens": 0}, "at least one"),
        ({"prompt": "x", "checker": "exact", "expect": "y", "language": "xx"}, "no language 'xx'"),
        ({"messages": [{"content": "x"}], "checker": "exact", "expect": "y"}, "every message has a role"),
        ({"id": "1", "prompt": "x", "checker": "exact", "expect": "y"}, "two items with the id '1'"),
    ],
)
def test_a_mistake_is_named_with_its_line_before_anything_is_asked(tmp_path: Path, line: object, said: str):
    path = write(tmp_path / "s.jsonl", {"id": "1", "prompt": "x", "checker": "exact", "expect": "y"}, line)
    with pytest.raises(BenchError) as raised:
        own.items(path)
    assert "s.jsonl, line 2" in str(raised.value)
    assert said in str(raised.value)


def test_what_is_no_suite_is_said(tmp_path: Path):
    with pytest.raises(BenchError, match=r"holds no \.jsonl file"):
        own.items(tmp_path)
    with pytest.raises(BenchError, match="cannot be read"):
        own.items(tmp_path / "none.jsonl")
    with pytest.raises(BenchError, match="holds no items"):
        own.items(write(tmp_path / "empty.jsonl", ""))
    assert not own.is_file("quick")
    assert own.is_file("mine.jsonl")
    assert own.is_file("./mine")
