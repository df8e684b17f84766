"""The one dispatch rule: a registered kernel runs when the tensors lie on an accelerator, else the reference.

`STOKER_OPS=reference` forces the references everywhere, for debugging a kernel against them.
"""

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

KERNELS: dict[str, Callable[..., Any]] = {}


class Operation(Generic[P, R]):
    """A reference implementation that a kernel of the same name and signature may stand in for."""

    def __init__(self, reference: Callable[P, R]) -> None:
        self.reference = reference
        self.name = reference.__name__
        wraps(reference)(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        kernel = KERNELS.get(self.name)
        if kernel is not None and _on_accelerator(args) and os.environ.get("STOKER_OPS") != "reference":
            return kernel(*args, **kwargs)
        return self.reference(*args, **kwargs)


def operation(reference: Callable[P, R]) -> Operation[P, R]:
    """Marks a function as the torch reference of an operation."""
    return Operation(reference)


def register(name: str, kernel: Callable[..., Any]) -> None:
    """Lets `kernel` stand in for the operation `name` on accelerators."""
    KERNELS[name] = kernel


def _on_accelerator(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, torch.Tensor) and a.device.type not in ("cpu", "meta") for a in args[:1])
