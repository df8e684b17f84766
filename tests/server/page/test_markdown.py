"""What a model writes: Markdown, code with a copy button, JSON with line breaks, and never a script or a request."""

import json
from collections.abc import Callable
from typing import Any

from tests.server.page.conftest import Said, Stub

TEXT = """# A heading

Some *words*, `code` and a [link](https://example.org/page).

1. one
2. two
   - inner

| a | b |
|---|--:|
| 1 | 2 |

```python
print("<hello>")
```

- [x] done
"""
EVIL = """<img src=x onerror="window.hit = 1"> <script>window.hit = 2</script>

[click](javascript:window.hit=3) ![picture](https://example.org/tracker.png)

<style>body { display: none }</style><form action="https://example.org"><input name=a></form>

```html" onmouseover="window.hit = 4
<svg onload="window.hit = 5">
```

<a href="data:text/html,<script>1</script>">data</a> <math><mtext></mtext><mglyph><style><img src onerror=hit()></style>
"""


def test_markdown_becomes_markup(stub: Stub) -> None:
    stub.ask("show", Said(TEXT))
    said = stub.page.locator(".answer .said")
    assert said.locator("h1").inner_text() == "A heading"
    assert said.locator("ol li").count() == 3
    assert said.locator("td").all_inner_texts() == ["1", "2"]
    link = said.locator("a")
    assert (link.get_attribute("target"), link.get_attribute("rel")) == ("_blank", "noopener noreferrer")
    assert "☑ done" in said.inner_text()
    assert said.locator(".code-head").inner_text().strip() == "python"
    assert said.locator("pre").inner_text().strip() == 'print("<hello>")'


def test_code_and_answers_are_copied_as_they_are(opened: Callable[..., Any]) -> None:
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    Stub(page).ask("show", Said(TEXT))
    page.get_by_label("Copy this code").click()
    page.locator("#told", has_text="Copied.").wait_for(state="attached")
    assert page.evaluate("() => navigator.clipboard.readText()") == 'print("<hello>")'
    page.get_by_label("Copy the answer").click()
    page.wait_for_function("() => navigator.clipboard.readText().then(text => text.startsWith('# A heading'))")
    assert page.evaluate("() => navigator.clipboard.readText()") == TEXT


def test_json_is_shown_with_line_breaks(stub: Stub) -> None:
    found = {"name": "a {b}: c", "list": [1, {"x": []}], "total": 189.0}
    stub.ask("json", Said(json.dumps(found)))
    shown = stub.page.locator(".answer pre").inner_text()
    assert json.loads(shown) == found
    assert '\n  "total": 189.0\n' in shown, "numbers stay as they were written"


def test_nothing_a_model_writes_can_run_or_load_anything(stub: Stub) -> None:
    stub.ask(EVIL, Said(EVIL, reasoning=EVIL, calls=[(EVIL, json.dumps({EVIL: EVIL}))], finish="tool_calls"))
    page = stub.page
    page.locator(".thought summary").click()
    assert page.evaluate("() => window.hit") is None
    shown = page.locator("#messages")
    assert shown.locator("img, script, style, iframe, object, math, input, form[action]").count() == 0
    assert "<img src=x" in page.locator(".answer .said").inner_text(), "markup is shown as text"
    links = shown.locator("a").evaluate_all("all => all.map(each => each.getAttribute('href'))")
    assert [link for link in links if link] == ["https://example.org/tracker.png"], "a picture is a link, not loaded"
    handlers = "all => all.flatMap(each => [...each.attributes]).filter(each => each.name.startsWith('on')).length"
    assert shown.locator("*").evaluate_all(handlers) == 0


def test_a_stored_conversation_is_no_more_trusted_than_a_model(opened: Callable[..., Any]) -> None:
    page = opened()
    messages = [
        {"role": "user", "content": EVIL},
        {"role": "assistant", "content": EVIL, "calls": [{"id": "1", "name": EVIL, "arguments": EVIL}], "steps": []},
        {"role": "tool", "name": EVIL, "content": EVIL},
        {"role": "script", "content": EVIL},
        None,
    ]
    stored = {"id": "evil", "title": EVIL, "at": 1, "messages": messages}
    page.evaluate(
        "found => { localStorage.setItem('stoker.conversations', JSON.stringify([found, 5, null]));"
        " localStorage.setItem('stoker.conversation.evil', JSON.stringify(found)); }",
        stored,
    )
    page.reload()
    page.locator("#conversations .title").click()
    page.locator(".answer").wait_for()
    assert page.evaluate("() => window.hit") is None
    assert page.locator("#messages, #conversations").locator("img, script, style, math").count() == 0


def test_the_browser_itself_would_refuse_what_a_sanitiser_lets_through(page: Any) -> None:
    refused = page.evaluate(
        "() => { try { document.createElement('div').innerHTML = '<b>hello</b>'; return ''; }"
        " catch (error) { return error.name; } }"
    )
    assert refused == "TypeError", "markup from text takes the sanitiser's trusted type"
