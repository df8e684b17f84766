"""The page fits wide and narrow screens, is light and dark, and has no fault that axe finds.

With STOKER_SCREENSHOTS=FOLDER it leaves pictures there; those of docs/pictures were made so.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.clients.npm import installed
from tests.server.page.conftest import Said, Stub, settled

SHOTS = os.environ.get("STOKER_SCREENSHOTS")
AXE = "axe-core@4.14.1"
TEXT = """Some **words**, a [link](https://example.org) and `code`:

```python
x = 1
```

> said

| a | b |
|---|---|
| 1 | 2 |
"""
SIZES = [("1280", 1280, 800), ("390", 390, 844)]


@pytest.fixture(scope="module")
def axe() -> str:
    return (installed(AXE) / "node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")


def _faults(page: Any, axe: str) -> list[str]:
    page.evaluate(axe)
    found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{fault['id']}: {node['target']} {node['failureSummary']}"
        for fault in found["violations"]
        for node in fault["nodes"]
    ]


@pytest.mark.parametrize(("name", "width", "height"), SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_fault(
    opened: Callable[..., Any], axe: str, name: str, width: int, height: int, scheme: str
) -> None:
    page = opened(width, height, color_scheme=scheme, bypass_csp=True)
    stub = Stub(page)
    assert _faults(page, axe) == [], "an empty conversation"
    stub.ask("hello", Said(TEXT, reasoning="Let me see.", finish="length"))
    stub.ask("call", Said(calls=[("add", '{"a": 1}')], finish="tool_calls"))
    stub.ask("fail", (503, "The engine is being started again."))
    page.locator(".thought summary").first.click()
    page.locator(".user").first.hover()
    assert _faults(page, axe) == [], "a conversation"
    for opener in ("#open-list", "#open-numbers"):
        if page.locator(opener).is_visible() and page.locator(opener).get_attribute("aria-expanded") == "false":
            page.locator(opener).click()
            assert _faults(page, axe) == [], opener
            page.keyboard.press("Escape")
    page.locator("#open-settings").click()
    page.locator(".keys-list summary").click()
    assert _faults(page, axe) == [], "the settings"


@pytest.mark.parametrize(("name", "width", "height"), SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_wide_and_narrow_screens_in_light_and_dark(
    opened: Callable[..., Any], name: str, width: int, height: int, scheme: str
) -> None:
    page = opened(width, height, color_scheme=scheme)
    page.locator(".example").first.click()
    settled(page)
    page.locator("#new" if name == "1280" else "#open-list").click()
    if name == "390":
        page.locator("#new").click()
    page.locator(".example", has_text="Call a tool").click()
    settled(page)
    page.wait_for_timeout(300)
    wide = page.evaluate("() => document.documentElement.scrollWidth")
    assert wide <= width, "nothing sticks out to the side"
    for part in ("#text", "#send", "#open-settings", ".call", ".cost"):
        box = page.locator(part).bounding_box()
        assert box is not None
        assert (box["x"] >= 0, box["x"] + box["width"] <= width) == (True, True), (part, box)
    cut = "all => all.filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.id || each.className)"
    assert page.locator("h1, #about, #next, .call dd, .cost, .gauge label, figcaption").evaluate_all(cut) == []
    numbers = page.locator("#numbers")
    assert numbers.is_visible() == (name == "1280"), "folded away where there is no room"
    ground = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(250, 249, 247)" if scheme == "light" else "rgb(24, 22, 20)")
    if SHOTS:
        page.screenshot(path=str(Path(SHOTS) / f"page-{name}-{scheme}.png"))
    if name == "390":
        page.locator("#open-numbers").click()
        assert numbers.is_visible()
        page.locator("#scrim").click(position={"x": 5, "y": 400})
        assert not numbers.is_visible()


def test_new_text_is_followed_until_the_reader_scrolls_up(stub: Stub) -> None:
    page = stub.page
    stub.ask("long", Said("\n\n".join(["a paragraph"] * 60)))
    at_end = (
        "() => { const node = document.querySelector('#scroll');"
        " return node.scrollHeight - node.scrollTop - node.clientHeight < 4; }"
    )
    page.wait_for_function(at_end)
    page.locator("#scroll").evaluate("node => node.scrollTo(0, 0)")
    page.locator("#newest").click()
    page.wait_for_function(at_end)
    page.locator("#newest").wait_for(state="hidden")
