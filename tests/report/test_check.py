"""The page of a check says the verdict first, shows what changed, escapes every word, and is drawn without a flaw."""

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from stoker.check.checkers import Reply
from stoker.check.document import document, load, to_json
from stoker.check.record import Asked, Document, Judged
from stoker.check.suites import arithmetic, invoices, tools
from stoker.cli.main import app
from stoker.report import changes
from stoker.report.check import html_check, sentence
from stoker.report.check_series import Series, html_series
from tests.check.mock import KnowingServer, right_answer, share
from tests.check.test_run import run
from tests.report.browser import NEEDS_CHROMIUM, VIEWS, charts_drawn

ITEMS = [*invoices.items("1", 40), *tools.items("1", 60), *arithmetic.items("1", 40)]


def served(wrong: float, seed: str = "a") -> KnowingServer:
    """Some tool calls are missing; some invoices have another number."""
    server = KnowingServer(ITEMS, lambda item: item.suite == "tools" and share(wrong, seed)(item))
    for item in ITEMS:
        if item.suite == "invoices" and share(wrong / 2, seed)(item):
            server.answers[item.id] = right_answer(item)[0].replace("1", "7", 2)
    return server


@pytest.fixture(scope="module")
def worse() -> Document:
    return run(served(0.4), served(0.0))


@pytest.fixture(scope="module")
def alone() -> Document:
    return run(served(0.4))


def test_the_verdict_is_a_sentence_and_comes_first(worse, alone):
    said = sentence(worse)
    assert re.fullmatch(r"A answers worse than B by \d\d points over all(, .+)? and \d\d points on tools\.", said), said
    page = html_check(worse)
    assert page.index(f"<h1>{said}</h1>") < page.index("<svg") < page.index("Where A did worse")
    assert sentence(run(served(0.0), served(0.0))) == "A answers as well as B, as far as 140 questions can tell."
    assert sentence(run(served(0.0), served(0.4))).startswith("A answers better than B by")
    right = sum(asked.replies["A"].score == 1 for asked in alone.answers)
    assert sentence(alone) == f"knows answered {right} of 140 questions rightly."
    failing = run(served(0.0), KnowingServer(ITEMS, fails=share(0.2, "f")))
    assert sentence(failing) == "This check cannot say whether A answers worse than B."
    assert "requests to B failed" in html_check(failing)
    assert sentence(replace(worse, complete=False)).startswith("So far: A answers worse")
    nothing = run(KnowingServer(ITEMS, fails=lambda _: True))
    assert "Nothing was measured" in html_check(nothing)


def test_what_changed_is_shown_as_one_text(worse):
    (lost, count, examples), *_ = changes.groups(worse.answers, True)
    gone = [a for a in worse.answers if (a.replies["A"].score or 0) < (a.replies["B"].score or 0)]
    assert (lost, count) == ("Where A did worse", len(gone))
    assert {each.name.partition("-")[0] for each in examples} == {"tools", "invoices"}
    invoice = next(each for each in examples if each.name.startswith("invoices"))
    assert [piece.mark for piece in invoice.pieces].count("ins") in (1, 2)
    b = next(a for a in worse.answers if a.id == invoice.name).replies["B"].reply
    told = "".join(piece.text for piece in invoice.pieces if piece.mark != "ins")
    assert "".join(told.split()) == "".join(changes.said(b).split())
    page = html_check(worse)
    assert "<del>" in page
    assert "<ins>" in page


def test_white_space_and_the_form_of_json_are_no_difference():
    assert changes.merged("a  b\nc", "a b c") == [changes.Side("", "a b c")]
    assert [p.mark for p in changes.merged("the red cat sat", "the blue cat sat")] == ["", "del", "ins", ""]
    assert [p.mark for p in changes.merged("wholly other words", "nothing alike")] == ["del", "", "ins"]

    def asked(a: str, b: str) -> Asked:
        replies = {"A": Judged(Reply(text=a), 1.0, "", []), "B": Judged(Reply(text=b), 1.0, "", [])}
        return Asked("1", "s", "", "d", "q", None, replies)

    assert changes.same_words([asked('{"a":1}', '{ "a": 1 }'), asked("x", "y")]) == (1, 2)
    [(title, count, _)] = changes.groups([asked("x  y", "x y"), asked("x", "y")], True)
    assert (title, count) == ("Same score in other words", 1)


def test_words_of_servers_and_models_are_never_markup(worse):
    evil = '"><script>alert(1)</script>'

    def spoiled(asked: Asked) -> Asked:
        replies = {
            name: replace(each, why=evil, problems=[evil], reply=replace(each.reply, text=evil + name, calls=[]))
            for name, each in asked.replies.items()
        }
        return replace(asked, id=evil + asked.id, suite=evil, kind=evil, question=evil, expect=evil, replies=replies)

    servers = [replace(s, url=evil, model=evil, engine=evil, tokenizer=evil) for s in worse.environment.servers]
    where = replace(worse.environment, servers=servers, command=evil, platform=evil)
    found = document(evil, evil, list(map(spoiled, worse.answers)), where, thinking=evil, notes=[evil])
    assert "<script" not in html_check(found)
    assert html_check(found).count("&lt;script&gt;") > 20
    assert "<script" not in html_series(Series([evil, "b", "c"], [found] * 3))


def test_the_page_loads_nothing_and_stays_small(worse):
    page = html_check(worse)
    assert not re.findall(r"<(?:script|link|img|iframe)|url\(|@import|src=", page)
    assert len(page.encode()) < 300_000
    assert "prefers-color-scheme: dark" in page


def test_checks_are_shown_compared_and_followed_over_time(worse, alone, tmp_path: Path):
    files = []
    for name, found in (("may", run(served(0.0))), ("june", run(served(0.05, "c"))), ("july", alone)):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(to_json(found), encoding="utf-8")

    def report(*arguments: object) -> str:
        ran = CliRunner().invoke(app, ["report", *map(str, arguments)])
        assert ran.exit_code == 0, ran.output
        return " ".join(ran.output.split())

    page, data = tmp_path / "p.html", tmp_path / "d.json"
    assert "Without --against there is nothing to compare with" in report(files[0], "--html", page)
    assert "answered 140 of 140 questions rightly" in page.read_text()
    assert "Worse: " in report(files[0], files[2], "--html", page, "--json", data)
    assert "<h1>A answers worse than B by" in page.read_text()
    assert load(data).verdict == "worse"
    said = report(*files, "--html", page, "--json", data)
    assert "july: Worse:" in said
    assert "june: No difference found" in said
    assert re.search(r"Answers got worse by \d\d points over all.*: july against may\.", said)
    found = json.loads(data.read_text())
    assert found["verdicts"] == ["", "no difference found", "worse"]
    passed = next(row for row in found["suites"] if (row["name"], row["measure"]) == ("tools", "passed"))
    assert passed["scores"][0] == 1.0
    assert passed["differences"][2] == pytest.approx(passed["scores"][2] - 1.0, abs=1e-6)
    (tmp_path / "bench.json").write_text('{"version": 1, "requests": []}')
    ran = CliRunner().invoke(app, ["report", str(files[0]), str(tmp_path / "bench.json")])
    assert "compare like with like" in str(ran.exception)
    ran = CliRunner().invoke(app, ["report", str(files[0]), "--csv", str(tmp_path / "x.csv")])
    assert "checks are shown as a table" in str(ran.exception)


@NEEDS_CHROMIUM
@pytest.mark.parametrize(("scheme", "width"), VIEWS)
@pytest.mark.parametrize("which", ["two servers", "one server", "over time"])
def test_a_browser_draws_it_and_has_nothing_to_say(worse, alone, which, scheme, width, tmp_path):
    pages = {
        "two servers": lambda: html_check(worse),
        "one server": lambda: html_check(alone),
        "over time": lambda: html_series(Series(["a-rather-long-name-of-a-file", "b", "c"], [alone, alone, alone])),
    }
    assert charts_drawn(pages[which](), scheme, width, tmp_path) == (2 if which == "two servers" else 1)
