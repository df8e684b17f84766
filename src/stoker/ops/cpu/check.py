"""Whether a product gives a row the same bits however many rows ride along, on this machine and for this shape."""

import torch

from stoker.ops.cpu.product import ROWS, Product

COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128)


def rows_independent(product: Product, inputs: int) -> bool:
    """Compares slices of 128 random rows with all of them, bit for bit."""
    x = torch.randn(ROWS, inputs, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = product(x)
    for count in COUNTS:
        for begin in {0, (ROWS - count) // 2, ROWS - count}:
            if not torch.equal(product(x[begin : begin + count].clone()), whole[begin : begin + count]):
                return False
    return True
