"""Completions that give the prompt back with its log-probabilities, as evaluation harnesses ask for them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import Running, chat_body

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PROMPT = "The quick brown fox jumps over the lazy dog."
BF16 = 0.1  # prompts and steps round differently; a token beside the right one is whole units away


def choice_of(server: Running, **body: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", {"prompt": PROMPT, "temperature": 0, "logprobs": 1, **body})
    response.raise_for_status()
    found: dict[str, Any] = response.json()["choices"][0] | {"usage": response.json()["usage"]}
    return found


def test_an_echoed_prompt_has_the_logprobs_that_its_tokens_have_as_an_answer(server: Running) -> None:
    made = choice_of(server, max_tokens=8, ignore_eos=True, return_token_ids=True)
    prompt, answer = made["prompt_token_ids"], made["token_ids"]
    for most in (0, 1):
        found = choice_of(server, prompt=prompt + answer, max_tokens=most, echo=True)
        logprobs = found["logprobs"]
        count = len(prompt) + len(answer)
        assert {len(column) for column in logprobs.values()} == {count + most}
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][len(prompt) : count] == pytest.approx(
            made["logprobs"]["token_logprobs"], abs=BF16
        )
        assert logprobs["tokens"][len(prompt) : count] == made["logprobs"]["tokens"]
        # the answer was the likeliest text, so each of its tokens is the best one at its place
        likeliest = [max(top.values()) for top in logprobs["top_logprobs"][len(prompt) : count]]
        assert logprobs["token_logprobs"][len(prompt) : count] == pytest.approx(likeliest, abs=0.05)
        assert found["text"].startswith(PROMPT)
        assert found["finish_reason"] == "length"
        assert found["usage"]["completion_tokens"] == most


def test_an_echoed_stream_says_the_same(server: Running) -> None:
    whole = choice_of(server, max_tokens=4, echo=True, ignore_eos=True)["logprobs"]
    body = {"prompt": PROMPT, "temperature": 0, "logprobs": 1, "max_tokens": 4, "echo": True, "ignore_eos": True}
    chunks = server.stream("/v1/completions", body)
    found: dict[str, list[Any]] = {name: [] for name in whole}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for name in found:
                found[name] += choice["logprobs"][name]
    assert found == whole


def test_nothing_to_make_and_nothing_to_echo_is_refused(server: Running) -> None:
    response = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 0})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "max_tokens is 0, expected at least 1; 0 only with echo."


def test_more_numbers_than_an_answer_should_hold_are_refused(server: Running) -> None:
    body = {"prompt": [5] * 7000, "max_tokens": 0, "echo": True, "logprobs": 20}
    response = server.post("/v1/completions", body)
    assert response.status_code == 400
    assert "147,000 numbers, and at most 131,072 are given" in response.json()["error"]["message"]


def test_prompt_logprobs_are_those_of_an_echo_in_vllms_form(server: Running) -> None:
    echoed = choice_of(server, max_tokens=1, echo=True, logprobs=1)["logprobs"]
    found = choice_of(server, max_tokens=1, prompt_logprobs=2, return_token_ids=True)
    ids, scored = found["prompt_token_ids"], found["prompt_logprobs"]
    assert scored[0] is None
    assert len(scored) == len(ids)
    for place, (token, each) in enumerate(zip(ids[1:], scored[1:], strict=True), start=1):
        assert each[str(token)]["logprob"] == echoed["token_logprobs"][place]
        assert each[str(token)]["decoded_token"] == echoed["tokens"][place]
        ranks = sorted(entry["rank"] for entry in each.values())
        assert ranks[:2] == [1, 2]
        assert len(each) == (2 if each[str(token)]["rank"] <= 2 else 3)
        assert max(entry["logprob"] for entry in each.values()) == max(echoed["top_logprobs"][place].values())


def test_a_conversation_is_scored_as_its_template_renders_it(server: Running) -> None:
    body = {**chat_body("Hello", temperature=0, max_tokens=1), "return_token_ids": True, "prompt_logprobs": 0}
    found = server.post("/v1/chat/completions", body).json()
    ids = found["prompt_token_ids"]
    bare = choice_of(server, prompt=ids, max_tokens=1, prompt_logprobs=0)
    assert found["prompt_logprobs"] == bare["prompt_logprobs"]
    assert [list(each) for each in found["prompt_logprobs"][1:]] == [[str(token)] for token in ids[1:]]


def test_log_likelihoods_are_those_that_lm_eval_recorded(server: Running) -> None:
    """benchmarks/server/harness/run.py recorded them; a new model needs a new record."""
    newest = sorted((BENCHMARKS / "results").glob("lm_eval-*.json"))[-1]
    recorded = json.loads(newest.read_text(encoding="utf-8"))["loglikelihoods"]
    questions = (BENCHMARKS / "server" / "harness" / "endings.jsonl").read_text(encoding="utf-8").splitlines()
    for question, expected in zip(map(json.loads, questions), recorded, strict=True):
        start = server.post("/tokenize", {"prompt": question["text"]}).json()["count"]
        found = []
        for ending in question["endings"]:
            echoed = choice_of(server, prompt=question["text"] + ending, max_tokens=1, echo=True)
            found.append(sum(echoed["logprobs"]["token_logprobs"][start:-1]))
        assert found == pytest.approx(expected, abs=0.5), question  # other processors round otherwise
