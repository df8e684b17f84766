"""The list of conversations that the browser keeps, and what is done from the keyboard."""

from collections.abc import Callable
from typing import Any

from tests.server.page.conftest import Said, Stub, settled


def test_conversations_are_kept_opened_renamed_and_deleted(stub: Stub) -> None:
    page = stub.page
    stub.ask("the first question\nof several lines", Said("one", reasoning="hm"))
    page.locator("#new").click()
    stub.ask("the second question", Said("two"))
    titles = page.locator("#conversations .title")
    assert titles.all_inner_texts() == ["the second question", "the first question"]
    page.reload()
    page.locator(".state.ready").wait_for()
    titles.nth(1).click()
    assert page.locator(".answer .said").inner_text() == "one"
    assert page.locator(".thought").count() == 1
    assert page.locator(".step").count() > 0, "how it was made is kept too"
    assert page.title() == "the first question – Stoker"
    page.get_by_label("Rename “the first question”").click()
    page.get_by_label("Name of the conversation").fill("about one")
    page.keyboard.press("Enter")
    assert "about one" in titles.all_inner_texts()
    page.get_by_label("Delete “about one”").click()
    assert titles.all_inner_texts() == ["the second question"]
    assert page.locator("#empty").is_visible()
    page.locator("#toast button").click()
    assert sorted(titles.all_inner_texts()) == ["about one", "the second question"]
    assert page.locator(".answer .said").inner_text() == "one"


def test_two_windows_show_the_same_list(opened: Callable[..., Any]) -> None:
    first = opened()
    second = opened(context=first.context)
    Stub(first).ask("said in the first window", Said("yes"))
    second.locator("#conversations .title", has_text="said in the first window").wait_for()


def test_an_answer_goes_on_while_another_conversation_is_shown(page: Any) -> None:
    page.locator(".example", has_text="little story").click()
    page.locator("#new").click()
    assert page.locator("#empty").is_visible()
    page.locator("#conversations .title").click()
    page.locator(".answer").wait_for()
    settled(page)
    assert len(page.locator(".answer .said").inner_text()) > 20
    assert page.locator(".notice").count() == 0


def test_a_full_storage_is_said(stub: Stub) -> None:
    fill = (
        "() => { for (let size = 1 << 22, key = 0; size > 0; key += 1) {"
        " try { localStorage.setItem(`full${key}`, 'x'.repeat(size)); } catch { size >>= 1; } } }"
    )
    stub.page.evaluate(fill)
    stub.ask("hello " * 50, Said("a text " * 100))
    assert "storage for the page is full" in stub.page.locator("#toast").inner_text()
    assert stub.page.locator(".answer .said").inner_text().startswith("a text")


def test_everything_can_be_done_from_the_keyboard(stub: Stub) -> None:
    page, keyboard = stub.page, stub.page.keyboard
    stub.ask("one\ntwo", Said("first"))
    stub.answers.append(Said("first, again"))
    keyboard.press("Alt+r")
    page.locator(".said", has_text="first, again").wait_for()
    settled(page)
    keyboard.press("Alt+s")
    assert page.locator("#settings").is_visible()
    keyboard.press("Escape")
    assert not page.locator("#settings").is_visible()
    page.locator("#scroll").focus()
    keyboard.press("/")
    keyboard.type("three")
    keyboard.press("Shift+Enter")
    keyboard.type("four")
    assert page.locator("#text").input_value() == "three\nfour"
    page.locator("#text").fill("")
    keyboard.press("Alt+n")
    assert page.locator("#empty").is_visible()
    page.locator("body").press("Tab")
    reached = set()
    for _ in range(30):
        reached.add(page.evaluate("() => document.activeElement.id || document.activeElement.className"))
        keyboard.press("Tab")
    assert {"new", "bare title", "open-numbers", "open-settings", "example", "text", "send"} <= reached
