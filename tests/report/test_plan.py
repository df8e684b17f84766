"""The page of a plan stands alone, adds up, and is drawn without a flaw."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from stoker.plan.answer import Question, answer
from stoker.report.plan import page
from stoker.report.plan_parts import segments
from tests.report.browser import NEEDS_CHROMIUM, VIEWS, charts_drawn

DFLASH = Question("122b", "spark", context=100_000, recipe="hybrid-dflash12")


def test_the_page_stands_alone_and_adds_up() -> None:
    found = answer(DFLASH)
    text = page(found)
    loads = re.findall(r"<(?:script|link|img|iframe)|url\(|@import|src=", text)
    assert not loads
    assert "prefers-color-scheme: dark" in text
    assert sum(size for _, _, size in segments(found)) == found.budget.total
    tags: list[str] = []

    class Balance(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "br", "rect", "line", "circle", "polygon", "polyline", "link"):
                tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag not in ("rect", "line", "circle", "polygon", "polyline"):
                assert tags.pop() == tag

    Balance().feed(text.replace("<!doctype html>", ""))
    assert not tags
    assert "has no drafter" in page(answer(Question("235b", "2xspark")))


@NEEDS_CHROMIUM
@pytest.mark.parametrize(("scheme", "width"), VIEWS)
@pytest.mark.parametrize(
    "question", [DFLASH, Question("gpt-oss-120b", "rtx-5090", context=8192)], ids=["fits", "does not"]
)
def test_a_browser_draws_it_and_has_nothing_to_say(question: Question, scheme: str, width: int, tmp_path: Path) -> None:
    found = answer(question)
    assert found.fits == (question is DFLASH)
    assert charts_drawn(page(found), scheme, width, tmp_path) == (2 if question is DFLASH else 1)
