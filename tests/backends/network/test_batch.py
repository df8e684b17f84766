"""Batches cut short."""

from dataclasses import fields

import pytest
import torch

from stoker.backends.family import Family
from stoker.backends.network.batch import Batch, Run


@pytest.mark.parametrize("family", [Family.STEP, Family.PREFILL])
def test_the_first_tokens_of_one_sequence_are_what_selecting_them_gives(family: Family) -> None:
    whole = Batch.of(family, [Run([5, 6, 7, 8], 62, 3, [4, 9], replay=2)], 64)
    for count in range(1, 5):
        quick, slow = whole.first(count), whole.select(torch.arange(4) < count)
        for field in fields(Batch):
            found, expected = getattr(quick, field.name), getattr(slow, field.name)
            same = torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected
            assert same, (field.name, count)
        assert torch.equal(quick.places, slow.places)
        assert torch.equal(quick.last_rows, slow.last_rows)
        assert quick.longest == count
