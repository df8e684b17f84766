"""A last message of the assistant's own is continued exactly where it ends."""

from typing import Any

import pytest

from stoker.demo import EMBEDDED
from stoker.server.errors import ApiError
from stoker.server.model import ServedModel, open_ended, thinks_at_the_end
from tests.server.running import Running

QUESTION = {"role": "user", "content": "Count to three."}


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel(EMBEDDED, ["demo"], 8192, {})


def continued(model: ServedModel, **last: Any) -> str:
    messages = [QUESTION, {"role": "assistant", "content": "", **last}]
    return model.decode(model.render(messages, continue_final=True))


@pytest.mark.parametrize("said", ["One, two,", "One, two, ", "One,\n\n", "  One", "", "say <think> and </think>"])
def test_white_space_and_tags_of_the_message_are_kept(model: ServedModel, said: str) -> None:
    assert continued(model, content=said).endswith(f"<|im_start|>assistant\n<think>\n\n</think>\n\n{said}")


def test_a_thought_of_its_own_replaces_the_templates_empty_one(model: ServedModel) -> None:
    assert continued(model, content="<think>\nWell, ").endswith("<|im_start|>assistant\n<think>\nWell, ")
    done = "<think>\nWell.\n</think>\n\nOne, "
    assert continued(model, content=done).endswith(f"<|im_start|>assistant\n{done}")
    assert continued(model, content="One, ", reasoning_content="Well.").endswith(f"assistant\n{done}")
    assert continued(model, reasoning_content="Well, ").endswith("<|im_start|>assistant\n<think>\nWell, ")


def test_it_is_known_whether_the_answer_begins_inside_a_thought() -> None:
    def thinks(**last: Any) -> bool:
        return thinks_at_the_end([{"role": "assistant", "content": "", **last}])

    assert thinks(content="<think>\nWell, ")
    assert thinks(reasoning_content="Well, ")
    assert not thinks(content="<think>\nWell.\n</think>\n\nOne")
    assert not thinks(content="One", reasoning_content="Well.")
    assert not thinks(content="One <think>")
    assert not thinks(content="")


def test_what_cannot_be_continued_is_refused(model: ServedModel) -> None:
    with pytest.raises(ApiError, match="of role 'user'"):
        model.render([QUESTION], continue_final=True)
    call = {"type": "function", "id": "", "function": {"name": "f", "arguments": {}}}
    with pytest.raises(ApiError, match="tool calls is complete"):
        continued(model, tool_calls=[call])
    with pytest.raises(ApiError, match="leaves out the content"):
        open_ended([{"role": "assistant", "content": "x"}], lambda messages: "nothing of it")


def test_an_answer_goes_on_where_the_message_ended(server: Running) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "chat_template_kwargs": {"enable_thinking": False}}
    whole = server.chat("hello", **asked, return_token_ids=True)["choices"][0]
    text = str(whole["message"]["content"])
    tokens = whole["token_ids"][:3]
    start = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": start}]
    body = {"messages": said, **asked, "max_tokens": 9, "continue_final_message": True, "add_generation_prompt": False}
    rest = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert start + rest == text
    both = server.post("/v1/chat/completions", {**body, "add_generation_prompt": True})
    assert both.status_code == 400
    assert "cannot both be true" in both.json()["error"]["message"]
