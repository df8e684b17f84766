"""The demo's example prompts are ones that it does well: asked as a visitor would, with the page's own settings."""

import json
from typing import Any

from tests.server.page.conftest import settled


def _asked(page: Any, title: str) -> str:
    page.locator(".example", has_text=title).click()
    settled(page)
    assert page.locator(".notice").count() == 0, "nothing is cut"
    return str(page.locator(".answer .said").last.inner_text())


def test_the_invoice_is_read_without_a_mistake(page: Any) -> None:
    _asked(page, "Read an invoice")
    assert json.loads(page.locator(".answer pre").inner_text()) == {
        "vendor": "Harbor Tools Ltd",
        "invoice_number": "HT-20418",
        "date": "2026-03-14",
        "customer": "Anna Kovács",
        "currency": "EUR",
        "total": 682.75,
        "line_items": [
            {"product": "desk lamp", "qty": 4, "unit_price": 39.9},
            {"product": "office chair", "qty": 2, "unit_price": 189.0},
        ],
    }


def test_the_right_tool_is_called_and_its_result_told(page: Any) -> None:
    _asked(page, "Call a tool")
    said = page.locator(".call").inner_text().split("\n")
    assert said == ["weather_get", "unit", "celsius", "city", "Prague", "when", "2026-08-21"]
    page.locator(".results .strong").click()
    page.locator(".answer").nth(1).wait_for()
    settled(page)
    assert page.locator(".answer .said").last.inner_text() == "Here is the weather: temperature 21, humidity 60."


def test_the_story_is_about_a_fox_and_ends(page: Any) -> None:
    story = _asked(page, "little story")
    assert "fox" in story
    assert 100 < len(story) < 600
    assert story.endswith(".")


def test_a_question_about_a_text_is_answered_from_it(page: Any) -> None:
    assert _asked(page, "about a text") == "Anna bought a green kettle."
