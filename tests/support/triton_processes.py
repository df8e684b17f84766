"""Processes for kernel tests. Triton decides at its import whether kernels are interpreted, so a test run in which
anything else has imported it needs a process of its own for each way, and has one for all tests.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import pytest

from tests.backends.gpu.kernels import memcheck, patches, products

Run = Callable[..., Any]


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Run]:
    """Calls a function of a test module where kernels run in Triton's interpreter, without a GPU. An access outside of
    the tensors given to a kernel fails (`memcheck.py`); products have one order of sums (`products.py`)."""
    yield from _process("1")


@pytest.fixture(scope="session")
def compiler() -> Iterator[Run]:
    """Calls a function of a test module where kernels are compiled."""
    yield from _process("0")


def _process(interpret: str) -> Iterator[Run]:
    with ProcessPoolExecutor(1, get_context("spawn"), _start, (interpret,)) as pool:
        yield lambda function, *args: pool.submit(_call, function, *args).result()


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """With the same random numbers whatever ran before."""
    import torch

    torch.manual_seed(0)
    return function(*args)


def _start(interpret: str) -> None:
    os.environ["TRITON_INTERPRET"] = interpret
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # the products are tiny
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"
    if interpret == "1" and find_spec("triton"):
        memcheck.install()
        products.install()
        patches.install()
