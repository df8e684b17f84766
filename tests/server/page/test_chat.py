"""Asking and answering on the page, with the demo behind it: stream, stop, drafts drawn, live numbers, settings."""

import re
from typing import Any

from tests.server.page.conftest import Said, Stub, settled
from tests.server.running import Running


def test_a_chat_with_drafts_drawn_and_live_numbers(page: Any) -> None:
    assert page.locator("#model").inner_text() == "demo"
    assert page.locator("#about").inner_text() == "25 MB demonstration model, not an assistant"
    page.locator(".example", has_text="little story").click()
    settled(page)
    assert len(page.locator(".answer .said").inner_text()) > 20
    cost = page.locator(".answer .cost").inner_text()
    made = page.locator(".step i:not(.wrong)").count()
    assert cost.startswith(f"{made} tokens · "), "one square for every token"
    assert re.search(r"\d+ tokens/s · \d+\.\d\d per step", cost)
    assert re.search(r"Context, tokens\n\d+ of 8,192", page.locator("#gauges").inner_text())
    page.locator("#charts .chart", has_text="Speed").locator(".line[d*=L]").wait_for(state="attached")
    numbers = page.locator("#charts").inner_text()
    assert re.search(r"Memory used\n\d+\.\d\nof \d+ GiB", numbers)
    assert re.search(r"Per step\n\d\.\d\d\ntokens", numbers), "what the last steps made"
    labels = page.locator("#charts svg").evaluate_all("all => all.map(each => each.getAttribute('aria-label'))")
    assert [label.partition(", the last two minutes: now ")[0] for label in labels] == [
        "Speed", "Per step", "Requests", "Memory used",
    ]  # fmt: skip


def test_an_answer_is_stopped(page: Any, shared: Running) -> None:
    _set(page, temperature="2", max_tokens="4000")
    page.locator("#text").fill("Write on and on.")
    page.keyboard.press("Enter")
    page.locator(".step").first.wait_for()
    if page.locator("#stop").is_visible():  # it may have ended by itself already
        page.keyboard.press("Escape")
    settled(page)
    shared.until_idle()
    assert page.locator("#send").is_visible()


def test_what_a_server_refuses_is_said_in_its_words_and_can_be_tried_again(page: Any) -> None:
    _set(page, max_tokens="-5")
    page.locator("#text").fill("What is the capital of Hungary?")
    page.keyboard.press("Enter")
    page.locator(".notice.bad", has_text="max_tokens is -5").wait_for()
    _set(page, max_tokens="60")
    page.locator(".notice.bad button").click()
    settled(page)
    assert page.locator(".answer .said").inner_text() == "The capital of Hungary is Budapest."
    assert page.locator(".user").count() == page.locator(".answer").count() == 1


def test_drafts_are_drawn_as_right_and_wrong(stub: Stub) -> None:
    stub.ask("hello", Said("twelve chars", rejected=3))
    drawn = {name: stub.page.locator(f".step i.{name}").count() for name in ("right", "own", "wrong")}
    assert drawn == {"right": 2, "own": 2, "wrong": 6}
    assert stub.page.locator(".steps").get_attribute("aria-label") == (
        "2 steps made 4 tokens: 2 drafts accepted, 6 rejected"
    )
    stub.page.locator("#open-settings").click()
    stub.page.locator("[name=tokens]").check()
    assert stub.page.locator(".piece.wrong").all_inner_texts() == ["xxx", "xxx"]
    stub.page.locator("[name=steps]").uncheck()
    assert not stub.page.locator(".steps").is_visible()


def test_system_prompt_sampling_and_thinking_reach_the_server_and_are_kept(stub: Stub) -> None:
    _set(stub.page, system="Be brief.", temperature="0.7", top_p="0.9", top_k="20", max_tokens="99", seed="7")
    stub.page.locator("#open-settings").click()
    stub.page.locator("[name=thinking]").select_option("on")
    stub.page.locator("#settings .strong").click()
    assert "temperature 0.7 · at most 99 tokens · thinking on" in stub.page.locator("#next").inner_text()
    stub.ask("hello", Said("one"))
    stub.page.reload()
    stub.page.locator(".state.ready").wait_for()
    stub.ask("again", Said("two"))
    for asked, messages in zip(stub.asked, (2, 2), strict=True):
        assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
        assert len(asked["messages"]) == messages, "a page opens with a new conversation"
        assert {name: asked[name] for name in ("temperature", "top_p", "top_k", "max_completion_tokens", "seed")} == {
            "temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_completion_tokens": 99, "seed": 7,
        }  # fmt: skip
        assert asked["chat_template_kwargs"] == {"enable_thinking": True}
    stub.page.locator("#open-settings").click()
    stub.page.locator("#reset-settings").click()
    assert stub.page.locator("[name=temperature]").input_value() == "0", "what suits the demo"


def test_an_answer_is_made_again_and_a_message_edited(stub: Stub) -> None:
    stub.ask("one", Said("first"))
    stub.ask("two", Said("second"))
    stub.answers += [Said("second, again"), Said("other")]
    stub.page.locator(".again").last.click()
    stub.page.locator(".said", has_text="second, again").wait_for()
    settled(stub.page)
    assert [m["content"] for m in stub.asked[-1]["messages"]] == ["one", "first", "two"]
    stub.page.locator("#text").press("ArrowUp")
    field = stub.page.get_by_label("Edit the message")
    assert field.input_value() == "two"
    field.press("Escape")
    assert stub.page.locator(".user .said").all_inner_texts() == ["one", "two"]
    stub.page.locator(".user").first.hover()
    stub.page.locator(".user").first.get_by_label("Edit").click()
    field.fill("another")
    field.press("Enter")
    stub.page.locator(".answer .said", has_text="other").wait_for()
    settled(stub.page)
    assert stub.page.locator(".said").all_inner_texts() == ["another", "other"], "what came after it is gone"
    assert stub.asked[-1]["messages"] == [{"role": "user", "content": "another"}]


def test_a_thought_is_folded_away(stub: Stub) -> None:
    stub.ask("why?", Said("Because.", reasoning="Let me see. It is so."))
    thought = stub.page.locator(".thought")
    assert not stub.page.locator(".thought-text").is_visible()
    assert re.fullmatch(r"Thought( for \d+\.\d s)?", thought.locator("summary").inner_text())
    thought.locator("summary").click()
    assert stub.page.locator(".thought-text").inner_text() == "Let me see. It is so."
    stub.ask("and?", Said("Yes."))
    assert stub.asked[-1]["messages"][1]["reasoning_content"] == "Let me see. It is so."


def test_a_cut_answer_says_so_and_goes_on(stub: Stub) -> None:
    stub.ask("tell", Said("Once there was", finish="length"))
    notice = stub.page.locator(".notice.cut")
    assert re.match(r"Cut after \d+ tokens: that is the most an answer may have", notice.inner_text())
    stub.answers.append(Said(" a fox."))
    notice.locator("button").click()
    stub.page.locator(".said", has_text="a fox.").wait_for()
    settled(stub.page)
    assert stub.page.locator(".answer .said").inner_text() == "Once there was a fox."
    assert stub.asked[-1]["continue_final_message"] is True
    assert stub.asked[-1]["messages"][-1] == {"role": "assistant", "content": "Once there was"}
    assert notice.count() == 0


def test_a_full_context_is_told_from_a_limit(stub: Stub) -> None:
    stub.ask("tell", Said("Once", finish="length", prompt=8191))
    assert "the context of 8,192 tokens is full" in stub.page.locator(".notice.cut").inner_text()
    assert stub.page.locator(".notice.cut button").count() == 0


def test_errors_are_words(stub: Stub) -> None:
    stub.ask("a", (503, "The engine is being started again. Try again soon."))
    stub.ask("b", None)
    stub.ask("c", Said("half of", finish=None))
    stub.ask("d", Said("half of", error="The engine has crashed."))
    said = [text.removesuffix("Try again").strip() for text in stub.page.locator(".notice.bad").all_inner_texts()]
    assert said[0] == "The engine is being started again. Try again soon."
    assert re.match(r"The server at 127.0.0.1:\d+ cannot be reached .*Is it still running\?", said[1])
    assert said[2:] == ["The connection ended before the answer was complete.", "The engine has crashed."]
    assert stub.page.locator(".answer .said").all_inner_texts()[2:] == ["half of", "half of"], "what came is kept"


def test_tool_calls_are_shown_and_answered(stub: Stub) -> None:
    stub.page.locator("#open-settings").click()
    field = stub.page.locator("[name=tools]")
    field.fill('[{"type": "function"')
    assert "The tools are not JSON" in stub.page.locator("#tools-problem").inner_text()
    stub.page.locator("#settings .strong").click()
    assert stub.page.locator("#settings").is_visible(), "it does not close over what is wrong"
    tools = '[{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]'
    field.fill(tools)
    stub.page.locator("#settings .strong").click()
    called = Said(calls=[("add", '{"numbers": [1, 2], "note": "<b>sum</b>"}'), ("odd", "no json")], finish="tool_calls")
    stub.ask("sum", called)
    assert stub.asked[0]["tools"][0]["function"]["name"] == "add"
    calls = stub.page.locator(".call")
    assert calls.first.inner_text().split("\n") == ["add", "numbers", "1, 2", "note", "<b>sum</b>"]
    assert "no json" in calls.nth(1).inner_text()
    stub.answers.append(Said("Three."))
    stub.page.get_by_label("Result of add").fill("3")
    stub.page.get_by_label("Result of odd").fill("none")
    stub.page.locator(".results .strong").click()
    stub.page.locator(".said", has_text="Three.").wait_for()
    settled(stub.page)
    messages = stub.asked[-1]["messages"]
    assert [each["function"]["name"] for each in messages[1]["tool_calls"]] == ["add", "odd"]
    assert messages[2:] == [
        {"role": "tool", "tool_call_id": "call_0", "content": "3"},
        {"role": "tool", "tool_call_id": "call_1", "content": "none"},
    ]
    assert stub.page.locator(".results").count() == 0


def _set(page: Any, **values: str) -> None:
    page.locator("#open-settings").click()
    for name, value in values.items():
        page.locator(f"[name={name}]").fill(value)
    page.locator("#close-settings").click()
