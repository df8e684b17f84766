"""Miniature published checkpoints, made once; builds write into a test's own directory."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support import situations
from tests.support.random_checkpoint import small_drafter_config, write_random_drafter

Published = Callable[[str], str]
CopyOf = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small are slower on several threads, by far where the machine has other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Name of a function of `situations` -> directory it filled, as a command line would give it. Not to be changed."""
    root = tmp_path_factory.mktemp("published")

    def directory(name: str) -> str:
        path = root / name
        if not path.exists():
            if name == "drafter":
                write_random_drafter(path, small_drafter_config(situations.config_of(vision=False)))
            else:
                getattr(situations, name)(path)
        return str(path)

    return directory


@pytest.fixture
def copy_of(published: Published, tmp_path: Path) -> CopyOf:
    """The same, as a copy that a test may damage."""
    return lambda name: Path(shutil.copytree(published(name), tmp_path / f"copy_{name}"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "built"
