# Triton types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Planted mistakes: each kind of access past a tensor's end is found, and named."""

import pytest
import torch

from tests.backends.gpu.kernels import memcheck

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

COUNT = 6


@triton.jit
def copy_kernel(source_ptr, target_ptr, count, shift):
    """Right where `shift` is 0 and `count` the number of elements."""
    i = tl.arange(0, 8)
    x = tl.load(source_ptr + shift + i, mask=i < count, other=0.0)
    tl.store(target_ptr + i, x, mask=i < count)


@triton.jit
def scalar_kernel(source_ptr, target_ptr, at):
    tl.store(target_ptr, tl.load(source_ptr + at))


@triton.jit
def count_kernel(counter_ptr, at):
    tl.atomic_add(counter_ptr + at, 1)


@triton.jit
def swap_kernel(counter_ptr, at):
    tl.atomic_cas(counter_ptr + at, 0, 1)


def test_what_lies_inside_is_left_alone(interpreter) -> None:
    interpreter(check_inside)


def check_inside() -> None:
    source, target = torch.arange(float(COUNT)), torch.zeros(COUNT)
    copy_kernel[(1,)](source, target, COUNT, 0)
    assert torch.equal(source, target)
    counters = torch.zeros(3, dtype=torch.int32)
    count_kernel[(5,)](counters, 2)
    swap_kernel[(1,)](counters, 1)
    assert counters.tolist() == [0, 1, 5]


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("load", "copy_kernel: load of 4 bytes .* in 2 of 6 active lanes; the first 24 bytes .* of source_ptr"),
        ("store", "copy_kernel: store of 4 bytes .* in 1 of 7 active lanes; the first 24 bytes .* of target_ptr"),
        ("before", "scalar_kernel: load of 4 bytes .* the first -4 bytes after the start of source_ptr"),
        ("view", "scalar_kernel: load of 4 bytes .* the first 8 bytes after the start of source_ptr, which has 8"),
        ("add", "count_kernel: atomic_rmw of 4 bytes .* the first 12 bytes after the start of counter_ptr"),
        ("swap", "swap_kernel: atomic_cas of 4 bytes .* the first -4 bytes after the start of counter_ptr"),
    ],
)
def test_a_mistake_is_named(interpreter, mistake: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        interpreter(make, mistake)


def make(mistake: str) -> None:
    memory = torch.zeros(300)  # one allocation, so that what lies beside each tensor is known
    source, target, counters = memory[100 : 100 + COUNT], memory[200 : 200 + COUNT], memory[50:53].view(torch.int32)
    {
        "load": lambda: copy_kernel[(1,)](source, target, COUNT, 2),
        "store": lambda: copy_kernel[(1,)](memory[100:108], target, COUNT + 1, 0),
        "before": lambda: scalar_kernel[(1,)](source, target, -1),
        "view": lambda: scalar_kernel[(1,)](source[:2], target, 2),
        "add": lambda: count_kernel[(1,)](counters, 3),
        "swap": lambda: swap_kernel[(1,)](counters, -1),
    }[mistake]()


def test_another_interpreter_is_refused(interpreter) -> None:
    interpreter(check_refusal)


def check_refusal() -> None:
    class Changed:
        class InterpreterBuilder:
            create_masked_load = create_masked_store = create_atomic_cas = None

        class _interpreter:
            load = store = load_twice = None

    with pytest.raises(RuntimeError, match=r"no \['create_atomic_rmw'\] or reaches memory by \['load_twice'\]"):
        memcheck._expect(Changed)
