"""Bounds of every memory access in Triton's interpreter, which would otherwise read and write whatever lies there.

A GPU stops with "illegal memory access" long after the kernel at fault, and only where nothing else happens to lie at
the address. Here an active lane outside of all tensors passed to its kernel is an error that names kernel and argument.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

Addresses = np.ndarray[Any, np.dtype[np.uint64]]
# where the interpreter's builder calls its C functions, and the arguments that are addresses and their mask
ACCESSES: dict[str, tuple[str, int, int | None]] = {
    "create_masked_load": ("load", 0, 1),
    "create_masked_store": ("store", 0, 2),
    "create_atomic_cas": ("atomic_cas", 0, None),
    "create_atomic_rmw": ("atomic_rmw", 1, 3),
}


class OutOfBounds(IndexError):
    """Carries a single message, so that it survives the way between processes."""


class Launch:
    """A kernel at work, and the memory it was given."""

    def __init__(self, kernel: str, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self.kernel, self._tensors = kernel, [(name, *_extent(tensor)) for name, tensor in tensors if tensor.numel()]
        merged: list[list[int]] = []  # views of one tensor may overlap
        for _, start, stop in sorted(self._tensors, key=lambda each: each[1]):
            if merged and start < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], stop)
            else:
                merged.append([start, stop])
        self._starts, self._stops = [start for start, _ in merged], [stop for _, stop in merged]

    def check(self, access: str, addresses: Addresses, size: int) -> None:
        """Addresses of the active lanes, each of `size` bytes."""
        if not addresses.size or self._within_one(int(addresses.min()), int(addresses.max()) + size):
            return
        starts, stops = np.array([0, *self._starts], np.uint64), np.array([0, *self._stops], np.uint64)
        place = np.searchsorted(starts, addresses, side="right") - 1
        wrong = addresses[addresses + np.uint64(size) > stops[place]]
        if wrong.size:
            raise OutOfBounds(
                f"{self.kernel}: {access} of {size} bytes outside of every argument in {wrong.size} of "
                f"{addresses.size} active lanes; the first {self._described(int(wrong[0]), size)}."
            )

    def _within_one(self, start: int, stop: int) -> bool:
        """As nearly all accesses are."""
        place = bisect_right(self._starts, start) - 1
        return place >= 0 and stop <= self._stops[place]

    def _described(self, address: int, size: int) -> str:
        def distance(each: tuple[str, int, int]) -> int:
            return max(each[1] - address, address + size - each[2])

        name, start, stop = min(self._tensors, key=distance)
        return f"{address - start:,} bytes after the start of {name}, which has {stop - start:,}"


def install() -> None:
    """In this process, for all kernels, from now on."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    _expect(interpreter)
    if getattr(executor, "checks_bounds", False):
        return
    launch: list[Launch] = []  # the one at work

    def checked(access: Callable[..., Any], name: str, at: int, mask_at: int | None) -> Callable[..., Any]:
        def run(self: Any, *args: Any) -> Any:
            pointers = args[at]
            active = pointers.data if mask_at is None else pointers.data[args[mask_at].data]
            launch[-1].check(name, active.reshape(-1), max(1, pointers.get_element_ty().primitive_bitwidth // 8))
            return access(self, *args)

        return run

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = [*zip(self.arg_names, args, strict=False), *kwargs.items()]
        launch.append(Launch(self.fn.__name__, [each for pair in named for each in _tensors(*pair)]))
        try:
            return original(self, *args, **kwargs)
        finally:
            launch.pop()

    for function, (name, at, mask_at) in ACCESSES.items():
        setattr(builder, function, checked(getattr(builder, function), name, at, mask_at))
    original = executor.__call__
    executor.__call__, executor.checks_bounds = call, True


def _expect(interpreter: Any) -> None:
    """That this interpreter reaches memory where the checks are, and nowhere else."""
    missing = [name for name in ACCESSES if not hasattr(interpreter.InterpreterBuilder, name)]
    kinds = {name for name in dir(interpreter._interpreter) if name.startswith(("load", "store", "atomic"))}
    unknown = kinds - {name for name, _, _ in ACCESSES.values()}
    if missing or unknown:
        raise RuntimeError(
            f"this Triton's interpreter has no {missing} or reaches memory by {sorted(unknown)} as well: "
            "tests/backends/gpu/kernels/memcheck.py must be brought up to date with it."
        )


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple):
        for index, part in enumerate(value):
            yield from _tensors(f"{name}[{index}]", part)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First address, and the one after the last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
