"""What the interpreter's exactness stands on: a row of a product has the same bits in any company."""

import numpy as np

from tests.backends.gpu.kernels.products import product


def test_rows_and_columns_do_not_depend_on_company() -> None:
    random = np.random.default_rng(1)
    for inputs in (16, 32, 100, 128):
        a, b = (random.standard_normal(shape).astype(np.float32) for shape in ((3, 37, inputs), (3, inputs, 40)))
        whole = product(a, b, np.float32)
        expected = np.zeros_like(whole)
        for k in range(inputs):
            expected += a[:, :, k, None] * b[:, k, None, :]
        assert np.array_equal(whole, expected)
        assert np.array_equal(product(a[:, 36:], b, np.float32), whole[:, 36:])
        assert np.array_equal(product(a, np.ascontiguousarray(b[:, :, 8:16]), np.float32), whole[:, :, 8:16])
        assert np.allclose(whole, a @ b, rtol=1e-4, atol=1e-4)
