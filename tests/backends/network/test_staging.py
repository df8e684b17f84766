"""Weights that pass through a ring of memory arrive whole, whatever the card has not copied yet when more come."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.backends.network.staging import Staging
from stoker.weights.direct import ALIGN
from stoker.weights.headers import TensorInfo
from stoker.weights.reader import read_tensors
from tests.support.tensor_files import _small_requests, content, expected, write  # noqa: F401 (a fixture)

SIZES = [300, 4096, 70_000, 1, 12_288, 40_000, 5, 90_000, 8192] * 12


class Card(Staging):
    """Copies nothing before it is asked whether it has: the latest moment that is allowed."""

    def __init__(self, size: int) -> None:
        self.copies: list[Callable[[], object]] = []
        self.waits = 0
        super().__init__(torch.device("cpu"), size)

    def _allocate(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def _mark(self) -> Any:
        copies, self.copies = self.copies, []

        def synchronize() -> None:
            self.waits += bool(copies)
            while copies:
                copies.pop(0)()

        return type("Mark", (), {"synchronize": staticmethod(synchronize)})()


class Target:
    """A place on that card."""

    def __init__(self, card: Card, info: TensorInfo) -> None:
        self.card, self.values = card, torch.zeros(info.shape, dtype=torch.uint8)

    def copy_(self, values: Tensor, non_blocking: bool) -> None:
        if non_blocking:
            self.card.copies.append(lambda: self.values.copy_(values))
        else:
            self.values.copy_(values)


@pytest.mark.parametrize("size", [100_000, 400_000, 1 << 24])
def test_every_byte_arrives(tmp_path: Path, size: int) -> None:
    infos = write(tmp_path / "a.safetensors", SIZES, 1001)
    card = Card(size)
    targets = {info.name: Target(card, info) for info in infos}
    staged = 0

    def take(info: TensorInfo) -> Tensor | None:
        nonlocal staged
        tensor = card.take(info)
        staged += tensor is not None
        return tensor

    for info, values in read_tensors(infos, into=take):
        card.send(values, targets[info.name])  # type: ignore[arg-type]
    card.finish()
    assert not card.copies
    for info in infos:
        assert content(targets[info.name].values) == expected(info)
    assert staged >= 12, "of a small ring, as much as fits before the reader hands out the first"
    assert staged == len(SIZES) or size < 1 << 24
    assert card.waits


def test_a_tensor_lies_where_a_direct_read_can_write_it(tmp_path: Path) -> None:
    (info,) = write(tmp_path / "a.safetensors", [50_000], 1001)
    tensor = Card(1 << 20).take(info)
    assert tensor is not None
    assert (tensor.data_ptr() - info.offset) % ALIGN == 0


def test_what_is_too_large_or_comes_too_soon_goes_another_way(tmp_path: Path) -> None:
    first, second, third, large = write(tmp_path / "a.safetensors", [200_000, 200_000, 200_000, 400_000])
    card = Card(700_000)
    assert card.take(large) is None
    card = Card(900_000)
    assert card.take(first) is not None
    assert card.take(second) is not None
    assert card.take(third) is not None
    assert card.take(first) is not None
    assert card.take(second) is None, "nothing of it has been sent"
