"""The one dispatch rule. An operation is computed by the kernel registered for the kind of device its first argument
lies on ("cpu" or "accelerator"); without one, or where the kernel answers NotImplemented, by the reference.

A kernel answers NotImplemented to what it was not made for, such as weights that were not packed for it. Started with
`STOKER_OPS=reference` in the environment, the references compute everything, for debugging a kernel against them.
"""

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

Kind = Literal["cpu", "accelerator"]
KERNELS: dict[Kind, dict[str, Callable[..., Any]]] = {"cpu": {}, "accelerator": {}}


REFERENCES_ONLY = os.environ.get("STOKER_OPS") == "reference"


class Operation(Generic[P, R]):
    """A reference implementation that a kernel of the same name and signature may stand in for."""

    def __init__(self, reference: Callable[P, R]) -> None:
        self.reference = reference
        self.name = reference.__name__
        wraps(reference)(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        kernel = KERNELS[_kind(args)].get(self.name)
        if kernel is not None:
            result = kernel(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self.reference(*args, **kwargs)


def operation(reference: Callable[P, R]) -> Operation[P, R]:
    """Marks a function as the torch reference of an operation."""
    return Operation(reference)


def register(name: str, kernel: Callable[..., Any], kind: Kind = "accelerator") -> None:
    """Lets `kernel` stand in for the operation `name` on devices of that kind."""
    if not REFERENCES_ONLY:
        KERNELS[kind][name] = kernel


def _kind(args: tuple[Any, ...]) -> Kind:
    first = args[0]
    return "cpu" if not isinstance(first, torch.Tensor) or first.is_cpu or first.is_meta else "accelerator"
