"""The two numeric families: a token's bits depend on its own text alone, never on chunking, batch or cache."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from stoker.backends.family import PAGE_SIZE, Family
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.load import load_model
from tests.backends.network.forward import new_cache, relative, row_errors, run_chunks, split, state_of
from tests.conftest import FAMILIES

LENGTH = 300
DTYPES = (torch.float32, torch.bfloat16)


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(0, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", list(Family))
def test_any_chunking_ends_in_the_same_state_and_logits(
    checkpoints: dict[str, Path], family: str, kind: Family
) -> None:
    model = load_model(checkpoints[family], dtype=torch.float32).model
    tokens = prompt(1, 150)
    cache = new_cache(model)
    want = run_chunks(model, cache, tokens, [150], kind)
    want_state = state_of(cache, 0, range(16), 150)
    for size in (1, 7, 64):
        cache = new_cache(model)
        got = run_chunks(model, cache, tokens, split(150, size), kind)
        assert row_errors(got, want).max() <= 1e-5
        for ours, theirs in zip(state_of(cache, 0, range(16), 150), want_state, strict=True):
            assert relative(ours, theirs) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_chunks_at_multiples_of_64_are_bit_identical(
    checkpoints: dict[str, Path], family: str, dtype: torch.dtype
) -> None:
    model = load_model(checkpoints[family], dtype=dtype).model
    tokens = prompt(2)
    cache = new_cache(model)
    want = run_chunks(model, cache, tokens, [LENGTH], Family.PREFILL)
    want_state = state_of(cache, 0, range(16), LENGTH)
    for chunks in ([64, 64, 64, 64, 44], [128, 172], [256, 44], [64, 192, 44]):
        cache = new_cache(model)
        assert torch.equal(run_chunks(model, cache, tokens, chunks, Family.PREFILL), want)
        for ours, theirs in zip(state_of(cache, 0, range(16), LENGTH), want_state, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_of_any_length_are_bit_identical(checkpoints: dict[str, Path], family: str, dtype: torch.dtype) -> None:
    model = load_model(checkpoints[family], dtype=dtype).model
    tokens = prompt(3)
    cache = new_cache(model)
    run_chunks(model, cache, tokens[:100], [100], Family.PREFILL)
    start = {id(tensor): tensor.clone() for tensor in _tensors(cache)}
    want = run_chunks(model, cache, tokens[100:228], [128], Family.STEP, cached=100)
    want_state = state_of(cache, 0, range(16), 228)
    for chunks in ([1] * 128, [2] * 64, [3, 13, 16, 17, 1, 60, 18]):
        for tensor in _tensors(cache):
            tensor.copy_(start[id(tensor)])
        assert torch.equal(run_chunks(model, cache, tokens[100:228], chunks, Family.STEP, cached=100), want)
        for ours, theirs in zip(state_of(cache, 0, range(16), 228), want_state, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", list(Family))
@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_change_nothing(checkpoints: dict[str, Path], family: str, kind: Family, dtype: torch.dtype) -> None:
    """Sequences of different lengths in one forward equal each alone, bit for bit, in scattered pages and slots."""
    model = load_model(checkpoints[family], dtype=dtype).model
    lengths, cached = [5, 130, 64, 1], [320, 0, 64, 3]
    pages = [[0, 9, 2, 11, 4, 13], [5, 6, 7], [8, 1], [3]]
    if kind is Family.PREFILL:
        cached = [320, 0, 64, 0]
    texts = [prompt(10 + i, c + n) for i, (c, n) in enumerate(zip(cached, lengths, strict=True))]

    def fill(cache, members):
        for i in members:
            if cached[i]:
                run_chunks(model, cache, texts[i][: cached[i]], [cached[i]], Family.PREFILL, slot=i, pages=pages[i])

    def forward(cache, members):
        runs = [Run(texts[i][cached[i] :], cached[i], i, pages[i]) for i in members]
        with torch.inference_mode():
            batch = Batch.of(kind, runs, PAGE_SIZE)
            hidden, _ = model(batch, cache)
            if kind is Family.STEP:
                for i in members:
                    cache.settle(i, lengths[i])
            return model.logits(hidden, kind).split([lengths[i] for i in members])

    together = new_cache(model)
    fill(together, range(4))
    rows = forward(together, [2, 0, 3, 1])
    for i, got in zip([2, 0, 3, 1], rows, strict=True):
        alone = new_cache(model)
        fill(alone, [i])
        assert torch.equal(got, forward(alone, [i])[0])
        total = cached[i] + lengths[i]
        for ours, theirs in zip(
            state_of(together, i, pages[i], total), state_of(alone, i, pages[i], total), strict=True
        ):
            assert torch.equal(ours, theirs)


def _tensors(cache):
    for layer in cache.layers:
        yield from (value for value in vars(layer).values() if isinstance(value, Tensor))
