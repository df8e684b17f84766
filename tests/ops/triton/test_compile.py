"""Every kernel compiles, without a GPU, for the boxes Stoker is for, and fits their shared memory."""

from functools import cache
from typing import Any

import pytest

pytest.importorskip("triton")

KB = 1024
TARGETS = {
    "sm_90": ("cuda", 90, 227 * KB),
    "sm_121": ("cuda", 121, 99 * KB),
    "gfx1151": ("hip", "gfx1151", 64 * KB),
    "gfx1201": ("hip", "gfx1201", 64 * KB),
    "gfx1100": ("hip", "gfx1100", 64 * KB),
}
TYPES = {
    "x_ptr": "*bf16",
    "packed_ptr": "*i16",
    "scales_ptr": "*fp16",
    "y_ptr": "*bf16",
    "partial_ptr": "*fp32",
    "outputs_ptr": "*fp32",
    "weights_ptr": "*fp32",
    "tokens": "i32",
    "pairs": "i32",
}  # what is not named here is *i32


@pytest.mark.parametrize("name", TARGETS)
def test_kernels_fit(compiler, name: str) -> None:
    backend, architecture, limit = TARGETS[name]
    shared = compiler(shared_memory, backend, architecture)
    assert len(shared) == 7
    assert all(size <= limit for size in shared.values()), shared


@pytest.mark.parametrize("name", ["sm_90", "sm_121"])
def test_operands_go_straight_to_registers(compiler, name: str) -> None:
    """Shared memory holds the partial sums of the slices and no operand: that is what makes the kernels fast."""
    shared = compiler(shared_memory, *TARGETS[name][:2])
    partial_sums = {"linear 1": 4 * 16 * 8 * 4, "linear 16": 4 * 16 * 16 * 4, "gate_up": 4 * 16 * 8 * 4}
    assert all(shared[kernel] <= size for kernel, size in partial_sums.items()), shared


@cache
def shared_memory(backend: str, architecture: Any) -> dict[str, int]:
    """Bytes of shared memory of each kernel, by name."""
    import triton.language as tl

    import stoker.ops.triton.int4_experts as int4_experts
    import stoker.ops.triton.int4_linear as int4_linear

    math = {"PTX": backend == "cuda", "DOT": tl.bfloat16, "enable_fp_fusion": False}
    sizes = {"OUT": 1024, "ROWS": 1024, "IN": 512}
    expert = {**sizes, "TOP_K": 8, "ONE_TOKEN": False, **math}
    gate_up = {**expert, "GATED": True, **int4_experts.launch_shape(512, gated=True)}
    down = {**expert, "GATED": False, "IN": 128, **int4_experts.launch_shape(128, gated=False)}
    kernels: dict[str, tuple[Any, dict[str, Any]]] = {
        f"linear {tokens}": (
            int4_linear.int4_linear_kernel,
            {**sizes, **math, **int4_linear.launch_shape(tokens, 1024, 512)},
        )
        for tokens in (1, 16)
    }
    kernels |= {
        "linear split": (
            int4_linear.int4_linear_kernel,
            {**sizes, **math, "IN": 4096, **int4_linear.launch_shape(1, 1024, 4096)},
        ),
        "gate_up": (int4_experts.experts_kernel, gate_up),
        "down": (int4_experts.experts_kernel, down),
        "tiles": (int4_experts.tiles_kernel, {"PADDED": 128, "num_warps": 1, "enable_fp_fusion": False}),
        "combine": (
            int4_experts.combine_kernel,
            {"OUT": 1024, "TOP_K": 8, "BLOCK": 512, "enable_fp_fusion": False},
        ),
    }
    return {name: compile_kernel(kernel, values, backend, architecture) for name, (kernel, values) in kernels.items()}


def compile_kernel(kernel: Any, values: dict[str, Any], backend: str, architecture: Any) -> int:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {name: value for name, value in values.items() if name in kernel.arg_names}
    options = {name: value for name, value in values.items() if name not in constants}
    if backend == "hip":
        options.pop("maxnreg", None)
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "*i32") for n in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n.endswith("_ptr")}
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget(backend, architecture, 32), options=options)
    return int(compiled.metadata.shared)
