"""A browser, a page of the shared server in it, and answers that are made up where the demo would not give them."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.server.running import PATIENCE_S, Running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WAIT_MS = PATIENCE_S * 1000


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here: install it (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any, shared: Running) -> Iterator[Callable[..., Any]]:
    """Opens pages that must not complain and must not ask anybody else for anything."""
    contexts: list[Any] = []
    problems: list[str] = []
    own = (shared.url, "data:")

    def open_one(width: int = 1280, height: int = 800, context: Any = None, **more: Any) -> Any:
        if context is None:
            context = browser.new_context(viewport={"width": width, "height": height}, **more)
            context.set_default_timeout(WAIT_MS)
            contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("request", lambda sent: problems.append(sent.url) if not sent.url.startswith(own) else None)
        page.goto(shared.url)
        page.locator(".state.ready").wait_for()
        return page

    yield open_one
    for context in contexts:
        context.close()
    expected = (
        "400 (Bad Request)",
        "503 (Service Unavailable)",
        "net::ERR_FAILED",
        "requires 'TrustedHTML' assignment",
    )
    assert not [each for each in problems if not any(words in each for words in expected)]


@pytest.fixture
def page(opened: Callable[..., Any]) -> Any:
    return opened()


@dataclass
class Said:
    """An answer that the page is to get, as the chunks of a stream."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[tuple[str, str]] = ()  # name, arguments
    finish: str | None = "stop"
    rejected: int = 1  # drafts of each step
    error: str = ""  # in the stream, after the content
    prompt: int = 30
    chunks: list[dict[str, Any]] = field(default_factory=list)

    def body(self) -> str:
        for text in _pieces(self.reasoning):
            self._chunk({"reasoning_content": text}, text)
        for text in _pieces(self.content):
            self._chunk({"content": text}, text)
        for index, (name, arguments) in enumerate(self.calls):
            start = {
                "index": index,
                "id": f"call_{index}",
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
            self._chunk({"tool_calls": [start]}, "<tool_call>")
            for text in _pieces(arguments):
                self._chunk({"tool_calls": [{"index": index, "function": {"arguments": text}}]}, text)
        if self.error:
            self.chunks.append({"error": {"message": self.error}})
        elif self.finish:
            self.chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish}]})
            self.chunks.append({"choices": [], "usage": self._usage(), "metrics": self._metrics()})
        return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in self.chunks) + "data: [DONE]\n\n"

    def _chunk(self, delta: dict[str, Any], text: str) -> None:
        drafts = {"accepted": 1, "forced": False, "tokens": [text[:2], text[2:]], "rejected": ["x"] * self.rejected}
        self.chunks.append({"choices": [{"index": 0, "delta": delta, "finish_reason": None, "drafts": drafts}]})

    @property
    def _steps(self) -> int:
        return sum(bool(chunk["choices"]) and "drafts" in chunk["choices"][0] for chunk in self.chunks)

    def _usage(self) -> dict[str, Any]:
        made = 2 * self._steps
        return {"prompt_tokens": self.prompt, "completion_tokens": made, "total_tokens": self.prompt + made}

    def _metrics(self) -> dict[str, Any]:
        drafts = {"num_draft_tokens": 2 * self._steps, "num_accepted_draft_tokens": self._steps}
        return {"steps": self._steps, "decode_s": 0.1, "speculative_decoding": drafts}


def _pieces(text: str) -> list[str]:
    return [text[at : at + 7] for at in range(0, len(text), 7)]


class Stub:
    """Stands between the page and /v1/chat/completions; the rest is the real server's."""

    def __init__(self, page: Any) -> None:
        self.page, self.asked, self.answers = page, list[dict[str, Any]](), list[Said | tuple[int, str] | None]()
        page.route("**/v1/chat/completions", self._answer)

    def ask(self, text: str, *answers: Said | tuple[int, str] | None) -> None:
        """Asks, and waits until the first answer is there. A pair is a status and an error; None is no connection."""
        self.answers += answers
        self.page.locator("#text").fill(text)
        self.page.keyboard.press("Enter")
        settled(self.page)

    def _answer(self, route: Any) -> None:
        self.asked.append(route.request.post_data_json)
        match self.answers.pop(0):
            case None:
                route.abort("failed")
            case (status, message):
                route.fulfill(status=status, json={"error": {"message": message}})
            case Said() as said:
                route.fulfill(status=200, content_type="text/event-stream", body=said.body())


def settled(page: Any) -> None:
    """Waits until the last answer is complete and drawn."""
    page.locator(".answer").last.wait_for()
    page.wait_for_function("() => !document.querySelector('.answer.running') && document.querySelector('#stop').hidden")


@pytest.fixture
def stub(page: Any) -> Stub:
    return Stub(page)
