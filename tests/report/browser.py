"""Opens a page in Chromium and holds it to what every page of ours promises."""

import shutil
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium")
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here: install it (Debian: apt-get install chromium)"
)
VIEWS = [("light", 1280), ("dark", 390)]
GROUNDS = {"light": "rgb(251, 250, 248)", "dark": "rgb(20, 23, 26)"}


def charts_drawn(html: str, scheme: str, width: int, folder: Path) -> int:
    """How many charts are visible; each has marks and no words cut off. Nothing is loaded, logged or too wide."""
    playwright = pytest.importorskip("playwright.sync_api")
    file = folder / "page.html"
    file.write_text(html, encoding="utf-8")
    said: list[str] = []
    with playwright.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on(
            "request",
            lambda request: said.append(request.url) if not request.url.startswith(("file:", "data:")) else None,
        )
        page.goto(file.as_uri())
        drawn = page.evaluate(
            "[...document.querySelectorAll('svg')].filter(svg => svg.checkVisibility()).map(svg => {"
            " const inside = box => box.x >= 0 && box.x + box.width <= svg.viewBox.baseVal.width;"
            " return [svg.querySelectorAll('rect,circle,polyline').length,"
            "  [...svg.querySelectorAll('text')].filter(text => !inside(text.getBBox())).map(text => text.textContent)"
            "];})"
        )
        hidden = page.evaluate(
            "[...document.querySelectorAll('h1, p, pre, td, .scroll, .card, .card *, figcaption')]"
            ".filter(each => each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).display !== 'inline')"
            ".map(each => each.textContent.trim().slice(0, 60))"
        )
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        sideways = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        browser.close()
    assert said == []
    assert all(marks > 0 for marks, _ in drawn)
    assert [words for _, cut in drawn for words in cut] == [], "cut off at the edge of a chart"
    assert hidden == [], f"wider than the place it has: {hidden}"
    assert sideways <= 0
    assert ground == GROUNDS[scheme]
    return len(drawn)
