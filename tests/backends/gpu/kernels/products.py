"""Matrix products of Triton's interpreter in one order of sums.

It leaves them to NumPy, whose library takes other instructions for a row among many than for the last ones, and others
on each processor: bits then depend on company, which no kernel here does. A GPU's matrix instruction has one order.
"""

from typing import Any

import numpy as np


def product(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    """a @ b, each sum from the first input to the last: rows of terms are added to rows, never terms within a row."""
    return np.add.reduce(a.astype(dtype)[..., :, :, None] * b.astype(dtype)[..., None, :, :], axis=-2)


def install() -> None:
    """In this process, for all kernels, from now on."""
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        assert a.data.dtype == b.data.dtype == np.float32, "bits of narrower formats would be taken for numbers"
        return interpreter.TensorHandle(product(a.data, b.data, d.data.dtype) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
