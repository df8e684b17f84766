"""A miniature of the data: generated text only, a vocabulary of 512."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from training.config import TINY
from training.data.build import build

from training import tokenizer as tokenizers

SCALE = 0.002


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are slower on many threads, and far slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards and tokenizer of the tiny shape."""
    out = tmp_path_factory.mktemp("data")
    build(out, TINY.trunk["vocab_size"], SCALE, corpora=False)
    return out


@pytest.fixture(scope="session")
def tokenizer(data: Path) -> Tokenizer:
    return tokenizers.load(data / "tokenizer")
