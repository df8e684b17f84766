"""What the trunk writes one token at a time is what its whole forward pass says at each place."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from training.batches import Mixture, read_shard
from training.config import TINY
from training.model import Model
from training.own_text import continuations, documents, main
from training.state import save_run


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(3)
    model = Model(TINY.model)
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # far from the start of training, so that guesses differ from place to place
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.requires_grad_(False)


def test_greedy_text_is_what_the_whole_forward_says(model: Model) -> None:
    prompts = torch.randint(0, 400, (3, 70), generator=torch.Generator().manual_seed(1))
    texts = continuations(model, prompts, 30)
    assert texts.shape == (3, 100)
    assert torch.equal(texts[:, :70], prompts)
    guesses = model.lm_head(model(texts).hidden).argmax(-1)
    assert torch.equal(texts[:, 70:], guesses[:, 69:-1])
    assert len(texts[:, 70:].unique()) > 10


def test_a_stray_stretch_is_drawn_and_what_follows_is_greedy(model: Model) -> None:
    prompts = torch.randint(0, 400, (1, 70), generator=torch.Generator().manual_seed(1)).expand(4, -1)
    texts = continuations(model, prompts, 10, stray=20, generator=torch.Generator().manual_seed(2))
    assert texts.shape == (4, 100)
    assert len({tuple(text) for text in texts[:, 70:90].tolist()}) == 4
    guesses = model.lm_head(model(texts).hidden).argmax(-1)
    assert torch.equal(texts[:, 90:], guesses[:, 89:-1])
    again = continuations(model, prompts, 10, stray=20, generator=torch.Generator().manual_seed(2))
    assert torch.equal(texts, again)


def test_a_text_ends_at_its_first_end() -> None:
    texts = np.array([[9, 5, 6, 9, 7], [1, 2, 3, 4, 5]])
    assert documents(texts, 2, end=9).tolist() == [9, 5, 6, 9, 1, 2, 3, 4, 5, 9]


@pytest.mark.parametrize(("source", "shard"), [("code", "own_code"), ("novels", "own_prose")])
def test_the_command_writes_a_shard_that_only_drafters_read(
    model: Model, data: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source, shard
) -> None:
    save_run(tmp_path / "trunk", model, None, {})
    (tmp_path / "shards" / "train").mkdir(parents=True)
    (tmp_path / "tokenizer").symlink_to(data / "tokenizer")
    for there, name in (("stories", source), ("questions", "questions")):
        (tmp_path / "shards" / "train" / f"{name}.xz").symlink_to(data / "shards" / "train" / f"{there}.xz")
    options = f"--weights {tmp_path / 'trunk'} --data {tmp_path} --shape tiny --passages 3 --written 5 --int4-group 32"
    options += f" --shard {shard}"
    monkeypatch.setattr(sys, "argv", ["own_text", *options.split()])
    main()
    tokens = read_shard(tmp_path / "shards" / "train" / f"{shard}.xz")
    assert 3 * 160 < len(tokens) <= 3 * 166
    shards = tmp_path / "shards"
    assert Mixture(shards, tokenizer).names == ["questions", source]
    assert Mixture(shards, tokenizer, own=True).names == ["questions", source, shard]
