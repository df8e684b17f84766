"""Makes Triton's interpreter several times faster without changing what it computes.

It derives the same types, shapes and NumPy types again for every operation, puts its own functions in place of the
language's at every call, and computes each whole-number sum three times to detect an overflow that it then ignores.
"""

from types import FunctionType
from typing import Any


def install() -> None:
    """In this process, for all kernels, from now on. Nothing is put back: kernels are only interpreted here."""
    from triton.runtime import interpreter

    if not hasattr(interpreter, "types_are_kept"):
        _patch_each_module_once(interpreter)
        _ignore_overflow(interpreter)
        _keep_types(interpreter)
        interpreter.types_are_kept = True


def _patch_each_module_once(interpreter: Any) -> None:
    """It looks at each name of the language to do so whenever a kernel calls a function."""
    original, nothing_to_restore = interpreter._patch_lang, interpreter._LangPatchScope()
    modules: set[int] = set()  # whose kernels find the interpreter's functions in the language they have imported

    def patch(kernel: FunctionType) -> Any:
        if id(kernel.__globals__) not in modules:
            original(kernel)
            modules.add(id(kernel.__globals__))
        return nothing_to_restore

    interpreter._patch_lang = patch


def _ignore_overflow(interpreter: Any) -> None:
    """The check ends in a device_assert, which does nothing outside of Triton's debug mode."""
    assert not interpreter.InterpreterOptions.debug
    interpreter.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None


def _keep_types(interpreter: Any) -> None:
    """Types are immutable: one that was made before is taken again."""
    from triton.language import core

    make_block, numpy_type = core.block_type.__init__, interpreter._get_np_dtype
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if (known := blocks.get((element_ty.name, sizes))) is None:
            make_block(self, element_ty, shape)
            known = blocks[element_ty.name, sizes] = self.__dict__
            known["of_tensors"] = core.constexpr(self.numel), core.tuple([core.constexpr(size) for size in sizes])
        self.__dict__ = known

    scalar = core.constexpr(1), core.tuple([])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else scalar

    def kept_numpy_type(type: Any) -> Any:
        if (known := numpy_types.get(type.name)) is None:
            known = numpy_types[type.name] = numpy_type(type)
        return known

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    interpreter._get_np_dtype = kept_numpy_type
