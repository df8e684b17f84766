"""Whether a product gives a row the same bits however many rows ride along, on this machine and for this shape.

oneDNN makes a kernel for each number of rows, and on one kind of processor cuts sums differently at 117 and 126 rows.
A result in bf16 hides nearly all of that, and the one number in 20,000 that it does not hide is enough to change an
answer. So every count is tried there, and kernels that round to bf16 are tried with weights and rows whose exact
product is zero: what comes out is the rounding of the sum and nothing else.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from stoker.backends.network.packing.products import ROWS, Product

COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128)
EVERY_COUNT = range(1, ROWS + 1)  # for a library that makes a kernel for each


def rows_independent(product: Product, rows: Tensor, counts: Sequence[int] = COUNTS) -> bool:
    """Compares slices of 128 rows with all of them, bit for bit."""
    whole = product(rows)
    for count in counts:
        for begin in {0, (ROWS - count) // 2, ROWS - count} if count in COUNTS else {count % (ROWS - count)}:
            if not torch.equal(product(rows[begin : begin + count].clone()), whole[begin : begin + count]):
                return False
    return True


def random_rows(inputs: int) -> Tensor:
    """For a kernel whose sums come out as they are."""
    return torch.randn(ROWS, inputs, generator=_generator()).bfloat16()


def cancelling_rows(inputs: int) -> Tensor:
    """For `cancelling_weight` and `cancelling_codes`; of many magnitudes, so that no sum is exact."""
    half = torch.randn(ROWS, inputs // 2, generator=_generator())
    half *= 2.0 ** -torch.randint(0, 20, half.shape, generator=_generator())
    return _twice(half, half, inputs).bfloat16()


def cancelling_weight(outputs: int, inputs: int) -> Tensor:
    """[out, in] bf16: the second half takes back what the first one adds, in another order."""
    half = torch.randn(outputs, inputs // 2, generator=_generator())
    return _twice(half, -half, inputs).bfloat16()


def cancelling_codes(outputs: int, inputs: int) -> Tensor:
    """[out, in] int32 codes 1..15 that stand for code - 8, likewise; all groups must have the same scale."""
    half = torch.randint(1, 16, (outputs, inputs // 2), generator=_generator(), dtype=torch.int32)
    return _twice(half, 16 - half, inputs)


def _twice(first: Tensor, second: Tensor, inputs: int) -> Tensor:
    """Side by side, the second one in another order, and a column of zeros where the number of inputs is odd."""
    order = torch.randperm(inputs // 2, generator=_generator())
    return pad(torch.cat([first, second[:, order]], dim=1), (0, inputs % 2))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
