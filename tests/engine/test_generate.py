"""One request from prompt to tokens: equal to transformers, reproducible, and refused with numbers when it must be."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from stoker.backends.network.load import load_model
from stoker.engine.engine import EngineConfig
from stoker.errors import RequestError
from stoker.sampling.settings import Sampling
from tests.conftest import FAMILIES
from tests.engine.drive import generate


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers_generate(checkpoints: dict[str, Path], family: str) -> None:
    model = load_model(checkpoints[family], dtype=torch.float32).model
    theirs = AutoModelForCausalLM.from_pretrained(checkpoints[family], dtype=torch.float32)
    for seed in range(3):
        prompt = torch.randint(0, 512, (70,), generator=torch.Generator().manual_seed(seed)).tolist()
        reply = theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
        assert list(generate(model, prompt, Sampling(24))) == reply[0, 70:].tolist()


def test_a_prompt_longer_than_one_prefill_budget_continues_as_from_one_forward(checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints["qwen3_5_moe_text"], dtype=torch.float32).model
    prompt = torch.randint(0, 512, (EngineConfig().prefill_budget + 70,)).tolist()
    theirs = AutoModelForCausalLM.from_pretrained(checkpoints["qwen3_5_moe_text"], dtype=torch.float32)
    reply = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert list(generate(model, prompt, Sampling(8))) == reply[0, len(prompt) :].tolist()


def test_a_seed_reproduces_and_another_seed_differs(checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints["qwen3_5_text"]).model
    first, again, other = (
        list(generate(model, [5, 6, 7], Sampling(20, temperature=1.0, seed=seed))) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_stop_id_ends_the_text_and_is_counted(checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints["qwen3_5_text"]).model
    free = list(generate(model, [5, 6, 7], Sampling(20)))
    stop = free[4]
    stopped = list(generate(model, [5, 6, 7], Sampling(20, stop_ids=(stop,))))
    assert stopped == free[: free.index(stop) + 1]


def test_requests_that_cannot_be_served_are_refused_with_numbers(checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints["qwen3_5_text"]).model
    with pytest.raises(RequestError, match=r"prompt has 8,000 tokens and max_tokens asks 193: 8,193 > context 8,192"):
        list(generate(model, [1] * 8000, Sampling(193)))
    with pytest.raises(RequestError, match="0 tokens"):
        list(generate(model, [], Sampling(1)))
    with pytest.raises(RequestError, match="token id 512 is outside the vocabulary of 512"):
        list(generate(model, [512], Sampling(1)))


def test_a_stop_string_ends_the_text_and_drafting_is_left_to_the_engine(checkpoints: dict[str, Path]) -> None:
    directory = checkpoints["qwen3_5_text"]
    model, tokenizer = load_model(directory).model, Tokenizer.from_file(str(directory / "tokenizer.json"))
    letters = Sampling(20, logit_bias=dict.fromkeys(range(60), 40.0))
    free = list(generate(model, [5, 6, 7], letters))
    text = tokenizer.decode(free)
    sampling = replace(letters, stop=(text[8:10],))
    stopped = list(generate(model, [5, 6, 7], sampling, "lookup:auto", tokenizer=tokenizer))
    assert stopped == free[: text.index(text[8:10]) + 2]


def test_a_mask_that_fails_raises_after_the_tokens_before_it(checkpoints: dict[str, Path]) -> None:
    class Broken:
        def allowed(self, output: Sequence[int]) -> Tensor | None:
            return None if len(output) < 3 else torch.zeros(512, dtype=torch.bool)

        def forced(self, output: Sequence[int]) -> Sequence[int]:
            return ()

    model = load_model(checkpoints["qwen3_5_text"]).model
    made: list[int] = []
    with pytest.raises(RequestError, match="the token mask allows no token after 3 output tokens"):
        made.extend(generate(model, [5, 6, 7], Sampling(20), mask=Broken()))
    assert made == list(generate(model, [5, 6, 7], Sampling(3)))
