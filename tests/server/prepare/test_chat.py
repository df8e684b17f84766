"""How much a model thinks and what is shown of it; parameters that are refused by name; answers begun by the client."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from stoker.engine.rules import ThinkingBudget
from stoker.sampling.mask import RemoteMask, mask_drafts
from stoker.sampling.settings import Sampling
from stoker.server.schemas.chat import ChatRequest
from stoker.server.schemas.common import UNSUPPORTED
from tests.server.running import Running, chat_body, text_of

QUESTION = [{"role": "user", "content": "hello"}]


class Never:
    """Rules of an answer that allow token 3 alone."""

    def allowed(self, output: Any) -> torch.Tensor:
        return torch.arange(8) == 3

    def forced(self, output: Any) -> tuple[int, ...]:
        return (3,)


def test_a_budget_closes_a_thought_that_is_still_open() -> None:
    mask = ThinkingBudget(tokens=2, close=7, ends=(5,), vocab_size=8)()
    assert mask.allowed([1]) is None
    assert mask.forced([1]) == ()
    found = mask.allowed([1, 1])
    assert found is not None
    assert found.nonzero().flatten().tolist() == [7]
    assert mask.forced([1, 1]) == (7,)
    assert mask.allowed([1, 7]) is None
    assert mask.allowed([1, 5]) is None
    assert mask.allowed([1, 1, 7]) is None
    inner = ThinkingBudget(2, 7, (), 8, Never)()
    assert inner.forced([1]) == (3,)
    assert inner.forced([1, 1]) == (7,)


class Elsewhere(RemoteMask):
    """Rules behind token 7, computed elsewhere: what was not asked for before would hold a step up."""

    waiting = False
    connection = None

    def __init__(self) -> None:
        self.asked: tuple[int, ...] | None = None
        self.closed = False

    def ask(self, output: Sequence[int], drafts: Sequence[int] = (), room: int = 0) -> int:
        text = (*output, *drafts)
        if 7 in text and text != self.asked:
            self.asked, self.waiting = text, True
        return len(drafts)

    def ready(self, output: Sequence[int]) -> bool:
        return 7 not in output or (not self.waiting and self.asked == tuple(output))

    def allowed(self, output: Sequence[int]) -> torch.Tensor | None:
        assert self.ready(output)
        return torch.arange(8) == 3 if 7 in output else None

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        return ()

    def close(self) -> None:
        self.closed = True


def test_a_step_waits_for_no_rules_that_are_computed_elsewhere_when_a_budget_closes_the_thought() -> None:
    made: list[Elsewhere] = []

    def elsewhere() -> Elsewhere:
        made.append(Elsewhere())
        return made[-1]

    mask = ThinkingBudget(2, 7, (), 8, elsewhere)()
    assert isinstance(mask, RemoteMask)
    inner = made[0]
    assert mask.ask([1], [2]) == 1
    assert mask.ready([1])
    assert not mask.waiting
    assert mask.ask([1, 1], [2, 3]) == 1
    assert inner.asked == (1, 1, 7)
    assert mask.waiting
    assert not mask.ready([1, 1])
    inner.waiting = False
    assert mask.ready([1, 1])
    assert mask.forced([1, 1]) == (7,)
    masks = mask_drafts(mask, Sampling(max_tokens=9), [1, 1], mask.allowed([1, 1]), [7], 8)
    assert [each.nonzero().flatten().tolist() for each in masks if each is not None] == [[7], [3]]
    mask.ask([1, 1, 7])
    assert mask.ready([1, 1, 7])
    mask.close()
    assert inner.closed


def test_effort_reaches_the_template() -> None:
    def options(**more: Any) -> dict[str, Any]:
        return ChatRequest.model_validate({"messages": [], **more}).template_options

    assert options() == {}
    assert options(reasoning_effort="none") == {"enable_thinking": False}
    assert options(reasoning_effort="high") == {"enable_thinking": True, "reasoning_effort": "high"}
    kept = options(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})
    assert kept == {"enable_thinking": False, "reasoning_effort": "high"}


def test_thinking_is_switched_hidden_and_limited(server: Running) -> None:
    given: Any = {"messages": QUESTION, "max_tokens": 30, "temperature": 0}

    def told(**more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        response = server.post("/v1/chat/completions", {**given, **more})
        assert response.status_code == 200, response.text
        found = response.json()
        return found["choices"][0]["message"], found["usage"]

    plain, usage = told()
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 1
    assert "reasoning_content" not in told(reasoning_effort="none")[0]
    assert told(reasoning_effort="low")[0]["reasoning_content"]
    hidden, counted = told(include_reasoning=False)
    assert (hidden.get("reasoning_content"), hidden["content"]) == (None, plain["content"])
    assert counted["completion_tokens_details"] == usage["completion_tokens_details"]
    chunks = list(server.stream("/v1/chat/completions", {**given, "include_reasoning": False}))
    assert (text_of(chunks, "reasoning_content"), text_of(chunks)) == ("", plain["content"])
    for budget in (0, 1):
        _, limited = told(thinking_token_budget=budget, ignore_eos=True)
        assert limited["completion_tokens_details"]["reasoning_tokens"] <= budget
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "yes"}}}
    assert told(thinking_token_budget=1, response_format=schema)[0]["content"] == '"yes"'
    refused = server.post("/v1/chat/completions", {**given, "thinking_token_budget": -1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "thinking_token_budget")
    anthropic = {"max_tokens": 30, "messages": QUESTION, "temperature": 0}
    thinking = {"type": "enabled", "budget_tokens": 1}
    found = server.post("/v1/messages", {**anthropic, "thinking": thinking}).json()["content"]
    assert len("".join(block.get("thinking", "") for block in found)) <= len(plain["reasoning_content"])
    responses = {"input": "hello", "max_output_tokens": 30, "temperature": 0, "thinking_token_budget": 0}
    assert server.post("/v1/responses", responses).json()["usage"]["output_tokens_details"]["reasoning_tokens"] == 0
    responses = {"input": "hello", "max_output_tokens": 30, "reasoning": {"effort": "none"}}
    assert server.post("/v1/responses", responses).json()["output"][0]["type"] == "message"


def test_parameters_that_would_change_the_answer_are_refused_by_name(server: Running) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat_body()),
        ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": QUESTION, "max_tokens": 2}),
    ]
    names: tuple[str, ...] = (
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "grammar",
        "json_schema",
        "regex",
    )
    names = (*names, "output_format", "bad_words", "chat_template", "typical_p")
    for path, body in bodies:
        for name in names:
            refused = server.post(path, {**body, name: "x"})
            assert refused.status_code == 400, (path, name, refused.text)
            assert f"{name} is not supported: " in refused.text
        neutral = dict.fromkeys(UNSUPPORTED) | {"typical_p": 1.0, "mirostat": 0, "bad_words": []}
        assert server.post(path, {**body, **neutral}).status_code == 200, path


@pytest.mark.parametrize("blocks", [False, True])
def test_an_answer_that_the_client_has_begun_goes_on_in_messages(server: Running, blocks: bool) -> None:
    begun = "The capital of"
    said: Any = [{"type": "text", "text": begun}] if blocks else begun
    given: Any = {"messages": [*QUESTION, {"role": "assistant", "content": said}], "max_tokens": 8, "temperature": 0}
    found = server.post("/v1/messages", given).json()
    chat = chat_body("hello", temperature=0, max_tokens=8, continue_final_message=True)
    chat["messages"].append({"role": "assistant", "content": begun})
    del chat["chat_template_kwargs"]
    wanted = server.post("/v1/chat/completions", chat).json()
    assert [block["type"] for block in found["content"]] == ["text"]
    assert found["content"][0]["text"] == wanted["choices"][0]["message"]["content"]
    usage = found["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert prompt == wanted["usage"]["prompt_tokens"]
    counted = server.post("/v1/messages/count_tokens", {"messages": given["messages"]}).json()
    assert counted["input_tokens"] == prompt
