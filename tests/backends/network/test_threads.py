"""How many threads compute a step, and which of them takes what, changes no bit of it."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from stoker.backends.family import PAGE_SIZE, Family
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.cache import Cache
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.load import load_model
from stoker.demo import checkpoint_at


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def answers(model: Decoder, threads: int) -> list[Tensor]:
    """Logits of drafted blocks of three sequences, half of each accepted, and the state they leave."""
    torch.set_num_threads(threads)
    cache = Cache.allocate(model.config, pages=12, slots=3, window=16)
    generator = torch.Generator().manual_seed(1)
    found, cached, replay = [], [0, 0, 0], [0, 0, 0]
    with torch.inference_mode():
        for lengths in [(16, 16, 16), (1, 7, 16), (16, 2, 5), (3, 1, 9)]:
            runs = [
                Run(torch.randint(0, 4000, (length,), generator=generator).tolist(), cached[i], i, pages, replay[i])
                for i, (length, pages) in enumerate(zip(lengths, ([4, 2], [9, 0], [1, 5]), strict=True))
            ]
            hidden, _ = model(Batch.of(Family.STEP, runs, PAGE_SIZE), cache)
            found.append(model.logits(hidden))
            replay = [-(-length // 2) for length in lengths]
            cached = [at + more for at, more in zip(cached, replay, strict=True)]
    return [*found, *(state.recurrent for state in cache.delta_states)]


@pytest.mark.usefixtures("_threads")
def test_threads_change_nothing() -> None:
    model = load_model(checkpoint_at("demo")).model
    alone = answers(model, 1)
    for threads in (2, 5):
        for _ in range(3):
            assert all(torch.equal(*pair) for pair in zip(answers(model, threads), alone, strict=True)), threads
