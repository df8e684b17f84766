"""The operation `int4_linear` on an accelerator: the step's projection kernel with memory of its own."""

import torch
from torch import Tensor

from stoker.backends.cpu.ops.dispatch import register
from stoker.backends.gpu.int4 import PackedInt4
from stoker.backends.gpu.kernels.launch import Workspace, check_tokens
from stoker.backends.gpu.kernels.linear import launch_shape, linear
from stoker.backends.gpu.packed import from_int4


def int4_linear(x: Tensor, weight: PackedInt4) -> Tensor:
    """[T, in] bf16 x [out, in] -> [T, out] bf16, T <= 128."""
    check_tokens(x, weight.in_features)
    check_int4("weight", weight, x, dimensions=4)
    split = launch_shape(x.shape[0], weight.rows, weight.in_features)["SPLIT"]
    y = x.new_empty(x.shape[0], weight.out_features)
    partial = x.new_empty((split, x.shape[0], weight.rows) if split > 1 else (0,), dtype=torch.float32)
    linear(x, from_int4(weight), y, Workspace(partial, weight.counters))
    return y


def check_int4(name: str, weight: PackedInt4, x: Tensor, dimensions: int) -> None:
    if weight.packed.dim() != dimensions:
        raise ValueError(f"{name}.packed must have {dimensions} dimensions, found {list(weight.packed.shape)}.")
    for field, tensor, dtype in (
        ("packed", weight.packed, torch.int16),
        ("scales", weight.scales, torch.float16),
        ("counters", weight.counters, torch.int32),
    ):
        if tensor.dtype != dtype:
            raise ValueError(f"{name}.{field} must be {dtype}, found {tensor.dtype}.")
        if tensor.device != x.device:
            raise ValueError(f"{name}.{field} must be on {x.device} like x, found {tensor.device}.")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}.{field} must be contiguous, found strides {tensor.stride()}.")


register("int4_linear", int4_linear)
