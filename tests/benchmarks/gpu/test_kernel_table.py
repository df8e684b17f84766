"""The table of kernels names tests that exist."""

import pytest

pytest.importorskip("triton")

from benchmarks.gpu.kernel_table import PARITY, TESTS


def test_every_test_of_parity_is_there() -> None:
    assert [file for file in PARITY.values() if not (TESTS / file).is_file()] == []
