"""Triton's interpreter puts its own functions in place of the language's once for every module, not at every call.

It does so whenever a kernel calls a function, by looking at each name of the language: a quarter of its time.
"""

from types import FunctionType
from typing import Any


def install() -> None:
    """In this process, for all kernels, from now on. Nothing is put back: kernels are only interpreted here."""
    from triton.runtime import interpreter

    original, nothing_to_restore = interpreter._patch_lang, interpreter._LangPatchScope()
    modules: set[int] = set()  # whose kernels find the interpreter's functions in the language they have imported

    def patch(kernel: FunctionType) -> Any:
        if id(kernel.__globals__) not in modules:
            original(kernel)
            modules.add(id(kernel.__globals__))
        return nothing_to_restore

    interpreter._patch_lang = patch
