"""A chat template that hangs or floods costs the request it was rendered for; one that always does is refused."""

import shutil
import threading
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from stoker import sandbox
from stoker.demo import EMBEDDED
from stoker.engine import chat_template
from stoker.errors import ConfigError, TokenizerError
from stoker.server.errors import ApiError
from stoker.server.model import ServedModel
from tests.server.running import HEALTH_S, Running, chat_body

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SAYS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
# what the conversation ends with decides; jinja computes constants already where it compiles
TREACHEROUS = (
    "{% set last = messages[-1].content %}{% set n = messages | length + 9 %}"
    "{% if last == 'loop' %}" + LOOP + "{% endif %}"
    "{% if last == 'fill' %}{{ 'x' * n ** 10 }}{% endif %}"
    "{% if last == 'print' %}{{ 'x' * n ** 7 }}{% endif %}"
    "{% if last == 'power' %}{{ n ** (n ** n) }}{% endif %}" + SAYS
)


def with_template(directory: Path, template: str) -> Path:
    shutil.copytree(EMBEDDED, directory, dirs_exist_ok=True)
    (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.fixture(scope="module")
def treacherous(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = with_template(tmp_path_factory.mktemp("treacherous") / "model", TREACHEROUS)
    running = Running("--model", str(directory), "--users", "4")
    try:
        yield running.wait()
    finally:
        assert running.stop() == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("loop", "chat_template.jinja took more than the 5 s that it may take."),
        ("power", "chat_template.jinja took more than the 5 s that it may take."),
        ("fill", "chat_template.jinja needs more than the 256 MiB of memory that it may take."),
        ("print", "chat_template.jinja printed 10,000,0"),
    ],
)
def test_others_go_on_while_a_template_hangs_or_floods(treacherous: Running, text: str, words: str) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(treacherous.post("/v1/chat/completions", chat_body(text)))

    askers = [threading.Thread(target=ask) for _ in range(4)]
    with treacherous.health_asked() as seconds:
        for asker in askers:
            asker.start()
        events = list(treacherous.stream("/v1/completions", {"prompt": "Hello", "max_tokens": 20, "ignore_eos": True}))
        unfinished = 4 - len(answers)
        for asker in askers:
            asker.join()
    assert "".join(choice["text"] for event in events for choice in event["choices"])
    if text in ("loop", "power"):
        assert unfinished == 4  # the stream ended before them
    assert {answer.status_code for answer in answers} <= {400, 503}
    for answer in answers:
        message = answer.json()["error"]["message"]
        if answer.status_code == 400:
            assert message.startswith(f"The chat template cannot render this conversation: {words}")
        else:
            assert (message, answer.headers["retry-after"]) == (
                "Other conversations are being rendered. Try again soon.",
                "2",
            )
    assert 400 in {answer.status_code for answer in answers}
    assert max(seconds) < HEALTH_S
    treacherous.chat("hello")
    treacherous.until_idle()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/tokenize"])
def test_every_way_to_the_template_is_guarded(treacherous: Running, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "fill"}], "input": "fill", "max_tokens": 2}
    if path in ("/v1/messages", "/v1/messages/count_tokens", "/tokenize"):
        del body["input"]
    else:
        del body["messages"], body["max_tokens"]
    answer = treacherous.post(path, body)
    assert answer.status_code == 400
    assert "needs more than the 256 MiB" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (LOOP, "chat_template.jinja took more than the 5 s"),
        ("{{ 'x' * 10 ** 10 }}", "chat_template.jinja needs more than the 256 MiB"),
        ("{% if %}", "chat_template.jinja is no template that jinja can read: line 1"),
    ],
)
def test_a_template_that_never_works_is_refused_at_the_start(tmp_path: Path, template: str, words: str) -> None:
    directory = with_template(tmp_path / "model", template)
    with pytest.raises(TokenizerError, match=words) as told:
        ServedModel(directory, ["x"], 8192, {})
    assert str(told.value).startswith(f"the chat template of {directory} fails on a conversation of one word. ")


def test_the_server_ends_with_that_sentence(tmp_path: Path) -> None:
    running = Running("--model", str(with_template(tmp_path / "model", "{{ 'x' * 10 ** 10 }}")))
    assert running.process.wait(120) == 2
    assert "fails on a conversation of one word" in " ".join(running.log.split())
    assert "Traceback" not in running.log
    running.stop()


def test_a_template_that_refuses_a_lone_question_is_served(tmp_path: Path) -> None:
    template = "{% if messages | length < 2 %}{{ raise_exception('A system message is missing.') }}{% endif %}" + SAYS
    model = ServedModel(with_template(tmp_path / "model", template), ["x"], 8192, {})
    question = {"role": "user", "content": "hello"}
    with pytest.raises(ApiError, match="cannot render this conversation: A system message is missing") as told:
        model.render([question])
    assert told.value.status == 400
    assert "hello" in model.decode(model.render([{"role": "system", "content": "Be brief."}, question]))


def test_where_all_children_are_busy_a_request_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ServedModel(EMBEDDED, ["x"], 8192, {})

    def busy(*arguments: Any, **options: Any) -> None:
        raise sandbox.Busy("all workers were busy.")

    monkeypatch.setattr(chat_template._children, "call", busy)
    with pytest.raises(ApiError, match="Try again soon") as told:
        model.render([{"role": "user", "content": "hello"}])
    assert (told.value.status, told.value.retry_after) == (503, 2)


def test_arguments_nested_too_deeply_are_refused() -> None:
    model = ServedModel(EMBEDDED, ["x"], 8192, {})
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "x", "parameters": deep}}
    with pytest.raises(ApiError, match="nested too deeply") as told:
        model.render([{"role": "user", "content": "hello"}], [tool])
    assert told.value.status == 400


@pytest.mark.parametrize("value", ['"hot"', "[1]", "true", "1e999", "NaN"])
def test_sampling_defaults_that_are_no_numbers_are_refused_at_the_start(tmp_path: Path, value: str) -> None:
    directory = with_template(tmp_path / "model", SAYS)
    (directory / "generation_config.json").write_text(f'{{"temperature": {value}}}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: temperature is no number"):
        ServedModel(directory, ["x"], 8192, {})
