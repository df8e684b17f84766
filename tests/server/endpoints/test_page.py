"""The page at /, in a real browser: it chats, draws drafts, shows live numbers, and needs nothing from elsewhere."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import PATIENCE_S, Running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SHOTS = os.environ.get("STOKER_SCREENSHOTS")  # a folder to put pictures in, for people to look at

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here: install it (Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, shared: Running) -> Iterator[Any]:
    """A page that must not complain, and must not ask anybody else for anything."""
    opened = browser.new_page(viewport={"width": 1366, "height": 768})
    opened.set_default_timeout(PATIENCE_S * 1000)
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    own = (shared.url, "data:")
    opened.on("request", lambda sent: problems.append(sent.url) if not sent.url.startswith(own) else None)
    opened.goto(shared.url)
    opened.locator(".state.ready").wait_for()
    yield opened
    opened.close()
    assert not [each for each in problems if "400 (Bad Request)" not in each]


def test_a_chat_with_drafts_drawn_and_live_numbers(page: Any) -> None:
    page.locator("#most").fill("60")
    page.locator("#temperature").fill("0")
    page.locator("#examples button").first.click()
    cost = page.locator(".cost", has_text="tokens in")
    cost.wait_for()
    assert len(page.locator(".answer .said").inner_text()) > 20
    tokens, steps = cost.inner_text().split(" tokens in ")[0], cost.inner_text().split(" tokens in ")[1].split(" ")[0]
    made = page.locator(".step i:not(.wrong)").count()
    assert made == int(tokens), "one square for every token"
    assert page.locator(".step").count() == int(steps) + 1, "one column for every step, and one for the prompt's end"
    assert float(page.locator("#speed").inner_text()) > 0
    assert float(page.locator("#accepted").inner_text()) >= 1
    assert page.locator("#context-text").inner_text().endswith("8,192")
    assert "GiB" in page.locator("#memory-text").inner_text()
    page.locator("#tokens").check()
    page.locator("#text").fill("Who wrote Northanger Abbey?")
    page.keyboard.press("Enter")
    page.locator(".cost", has_text="tokens in").nth(1).wait_for()
    assert page.locator(".answer").nth(1).locator(".said span").count() > 3
    assert page.locator(".user").count() == 2
    page.locator("#reset").click()
    assert page.locator("#messages > *").count() == 0


def test_an_answer_is_stopped(page: Any, shared: Running) -> None:
    page.locator("#most").fill("2000")
    page.locator("#temperature").fill("2")
    page.locator("#text").fill("Write on and on.")
    page.locator("#send").click()
    page.locator(".step").first.wait_for()  # it may have ended by itself already
    page.evaluate("() => running?.abort()" if not page.locator("#stop").is_visible() else "() => $('stop').click()")
    page.locator("#send").wait_for(state="visible")
    shared.until_idle()


def test_what_a_server_refuses_is_shown(page: Any) -> None:
    page.locator("#most").fill("-5")
    page.locator("#text").fill("hello")
    page.keyboard.press("Enter")
    page.locator(".error", has_text="max_tokens is -5").wait_for()


def test_what_a_model_writes_is_text_and_never_markup(page: Any) -> None:
    page.evaluate(
        "() => { const answer = new Answer(); answer.take({delta: {content: '<img src=x onerror=alert(1)>'}}); }"
    )
    assert page.locator(".answer img").count() == 0
    assert "<img" in page.locator(".answer .said").inner_text()


def test_drafts_are_drawn_as_right_and_wrong(page: Any) -> None:
    """Whether the server drafts at all depends on how fast it is, so these are made up."""
    drafts = "{accepted: 2, forced: false, tokens: ['a', 'b', 'c'], rejected: ['x']}"
    page.evaluate(f"() => new Answer().take({{delta: {{content: 'abc'}}, drafts: {drafts}}})")
    drawn = {name: page.locator(f".step i.{name}").count() for name in ("right", "own", "wrong")}
    assert drawn == {"right": 2, "own": 1, "wrong": 1}
    assert page.locator(".step").get_attribute("title") == "made: abc\nrejected: x"


@pytest.mark.parametrize(("name", "width", "height"), [("laptop", 1366, 768), ("phone", 390, 844)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_laptop_and_phone_in_light_and_dark(
    browser: Any, shared: Running, name: str, width: int, height: int, scheme: str
) -> None:
    opened = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    opened.set_default_timeout(PATIENCE_S * 1000)
    opened.goto(shared.url)
    opened.locator(".state.ready").wait_for()
    opened.locator("#examples button").first.click()
    opened.locator(".cost", has_text="tokens in").wait_for()
    wide = opened.evaluate("() => document.documentElement.scrollWidth")
    assert wide <= width, "nothing sticks out to the side"
    for part in ("#text", "#send", "#speed", "#memory-text"):
        box = opened.locator(part).bounding_box()
        assert box is not None
        right, bottom = box["x"] + box["width"], box["y"] + box["height"]
        assert (box["x"] >= 0, right <= width, bottom <= height) == (True, True, True), (part, box)
    ground, ink = (
        opened.evaluate(f"() => getComputedStyle(document.body).{each}") for each in ("backgroundColor", "color")
    )
    assert _contrast(ground, ink) > 7
    if SHOTS:
        opened.screenshot(path=str(Path(SHOTS) / f"{name}_{scheme}.png"))
    opened.close()


def _contrast(first: str, second: str) -> float:
    """WCAG's, of two rgb(...) colours."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
