"""What the trunk writes one token at a time is what its whole forward pass says at each place."""

import sys
from argparse import ArgumentTypeError
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training.batches import Mixture, read_shard
from training.config import TINY
from training.model import Model
from training.own_text import Writer, continuations, documents, main, passages, portions
from training.state import save_run

from stoker.weights.model_config import ModelConfig


def far_from_new(config: ModelConfig) -> Model:
    """A model whose guesses differ from place to place."""
    torch.manual_seed(3)
    model = Model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> Model:
    return far_from_new(TINY.model)


def prompts_of(rows: int, seed: int) -> Tensor:
    return torch.randint(0, 400, (rows, 70), generator=torch.Generator().manual_seed(seed))


def test_greedy_text_is_what_the_whole_forward_says(model: Model) -> None:
    prompts = prompts_of(3, seed=1)
    texts = continuations(Writer(model, 3, 100), prompts, 30)
    assert texts.shape == (3, 100)
    assert torch.equal(texts[:, :70], prompts)
    guesses = model.lm_head(model(texts).hidden).argmax(-1)
    assert torch.equal(texts[:, 70:], guesses[:, 69:-1])
    assert len(texts[:, 70:].unique()) > 10


def test_every_step_gives_the_logits_of_the_whole_forward() -> None:
    assert TINY.model.delta is not None
    delta = replace(TINY.model.delta, key_heads=2, value_heads=4)
    model = far_from_new(replace(TINY.model, num_heads=4, num_kv_heads=2, delta=delta))
    tokens = prompts_of(3, seed=1)
    writer = Writer(model, 3, places=90)  # the last twenty places are never filled
    stepwise = torch.stack([writer.step(tokens[:, place]) for place in range(70)], dim=1)
    torch.testing.assert_close(stepwise, model.lm_head(model(tokens).hidden), atol=2e-3, rtol=1e-3)


def test_a_step_can_be_recorded(model: Model) -> None:
    """A graph goes on with the shapes and addresses it was recorded with, and cannot ask the host."""
    writer = Writer(model, 2, places=8)

    def places() -> list[int]:
        kept = [writer.place, *(t for memory in writer.memories for t in vars(memory).values())]
        return [tensor.data_ptr() for tensor in kept]

    class Sizes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[str, torch.Size]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default, "the host looked at a value"
            out = func(*args, **(kwargs or {}))
            self.seen += [(str(func), part.shape) for part in tree_leaves(out) if isinstance(part, Tensor)]
            return out

    before, taken = places(), []
    for token in range(3):
        with Sizes() as sizes:
            writer.step(torch.tensor([token, token + 1]))
        taken.append(sizes.seen)
    assert taken[0] == taken[1] == taken[2]
    assert places() == before


def test_layers_of_a_kind_share_their_compiled_code(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU compiles: one graph that remembers, one that does not."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    prompts = prompts_of(3, seed=1)
    texts = continuations(Writer(model, 3, 90, compiled=True), prompts, 20)
    assert len(graphs) == 2
    assert torch.equal(texts, continuations(Writer(model, 3, 90), prompts, 20))


def test_a_writer_used_again_remembers_nothing(model: Model) -> None:
    writer = Writer(model, 4, 100)
    continuations(writer, prompts_of(4, seed=2), 30)
    fewer = prompts_of(3, seed=1)  # than it has rows
    assert torch.equal(continuations(writer, fewer, 20), continuations(Writer(model, 3, 90), fewer, 20))


def test_texts_that_do_not_fit_the_writer_are_refused(model: Model) -> None:
    writer = Writer(model, 2, 80)
    for rows, written in ((3, 10), (2, 11)):
        with pytest.raises(ValueError, match=f"2 rows of 80 tokens; {rows} of {70 + written} do not fit"):
            continuations(writer, prompts_of(rows, seed=1), written)


def test_a_stray_stretch_is_drawn_and_what_follows_is_greedy(model: Model) -> None:
    prompts = prompts_of(1, seed=1).expand(4, -1)
    writer = Writer(model, 4, 100)
    texts = continuations(writer, prompts, 10, stray=20, generator=torch.Generator().manual_seed(2))
    assert texts.shape == (4, 100)
    assert len({tuple(text) for text in texts[:, 70:90].tolist()}) == 4
    guesses = model.lm_head(model(texts).hidden).argmax(-1)
    assert torch.equal(texts[:, 90:], guesses[:, 89:-1])
    again = continuations(writer, prompts, 10, stray=20, generator=torch.Generator().manual_seed(2))
    assert torch.equal(texts, again)


def test_a_text_ends_at_its_first_end() -> None:
    texts = np.array([[9, 5, 6, 9, 7], [1, 2, 3, 4, 5]])
    assert documents(texts, 2, end=9).tolist() == [9, 5, 6, 9, 1, 2, 3, 4, 5, 9]


def test_batches_are_of_one_mixture_and_miss_no_passage() -> None:
    counts = {"own_code": 40_000, "own_prose": 20_001}
    batches = portions(counts, 8192)
    assert len(batches) == 8
    assert {shard: sum(batch[shard] for batch in batches) for shard in counts} == counts
    assert all(7_499 <= sum(batch.values()) <= 7_502 and batch["own_code"] == 5_000 for batch in batches)
    assert portions({"own_code": 3, "own_prose": 1}, 2) == [{"own_code": 1}, {"own_code": 2, "own_prose": 1}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("own_poems=3", "no shard 'own_poems'"),
        ("own_code", "'own_code' does not say how many"),
        ("own_code=0", "SHARD="),
    ],
)
def test_passages_that_cannot_be_written_are_named(text, said) -> None:
    with pytest.raises(ArgumentTypeError, match=said):
        passages(text)


@pytest.fixture
def shards(model: Model, data: Path, tmp_path: Path) -> Path:
    """A data directory with a trunk and something to continue."""
    save_run(tmp_path / "trunk", model, None, {})
    (tmp_path / "shards" / "train").mkdir(parents=True)
    (tmp_path / "tokenizer").symlink_to(data / "tokenizer")
    for there, name in (("stories", "code"), ("stories", "novels"), ("questions", "questions")):
        (tmp_path / "shards" / "train" / f"{name}.xz").symlink_to(data / "shards" / "train" / f"{there}.xz")
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, shards: Path, more: str) -> None:
    options = f"--weights {shards / 'trunk'} --data {shards} --shape tiny --written 5 --int4-group 32 {more}"
    monkeypatch.setattr(sys, "argv", ["own_text", *options.split()])
    main()


def test_the_command_writes_shards_that_only_drafters_read(
    shards: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, shards, "--passages own_code=5,own_prose=2 --side-by-side 3")
    train = shards / "shards" / "train"
    for shard, count in (("own_code", 5), ("own_prose", 2)):
        assert count * 160 < len(read_shard(train / f"{shard}.xz")) <= count * 166
    assert Mixture(shards / "shards", tokenizer).names == ["questions", "code", "novels"]
    own = Mixture(shards / "shards", tokenizer, own=True)
    assert own.names == ["questions", "code", "novels", "own_code", "own_prose"]


def test_out_of_time_the_batch_in_hand_is_kept(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, shards, "--passages own_code=4,own_prose=4 --side-by-side 4 --minutes 0")
    for shard in ("own_code", "own_prose"):
        assert 2 * 160 < len(read_shard(shards / "shards" / "train" / f"{shard}.xz")) <= 2 * 166
