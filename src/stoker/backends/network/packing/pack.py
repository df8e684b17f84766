"""Packing a model: which of torch's kernels multiplies with each weight, and how the weight lies for it.

INT4 stays INT4, INT8 codes and small matrices become fp16, larger ones bf16, as the sum of two numbers where one does
not hold the value (FP8 with its scale). Values are those of the checkpoint, always. A form whose rows are not
independent on this machine is not used.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from stoker.backends.network.experts import Experts, PackedExperts
from stoker.backends.network.linear import Fused, Weight, as_tensor
from stoker.backends.network.packing.products import (
    Bf16Product,
    Fp16Product,
    Int4Product,
    Packed,
    Product,
    SmallProduct,
    TiledProduct,
)
from stoker.backends.network.packing.trial import (
    COUNTS,
    EVERY_COUNT,
    cancelling_codes,
    cancelling_rows,
    cancelling_weight,
    random_rows,
    rows_independent,
)
from stoker.weights.formats.int4 import Int4, unpack_nibbles
from stoker.weights.formats.int8 import Int8Row
from stoker.weights.formats.joined import Joined
from stoker.weights.reader import Progress

SMALL = 32  # outputs up to which every row is multiplied by itself
INT4_OUTPUTS = 64  # outputs of one block of the int4 kernel
FEW_EXPERTS = 32  # that are computed all at once
CACHED = 1 << 17  # values of a matrix that stays in a core's cache while it is multiplied

_held: dict[tuple[str, int, int], bool] = {}  # (kind, out, in) -> rows are independent


def pack_model(module: nn.Module, progress: Progress | None = None) -> None:
    """Packs every projection and expert of a bf16 network in host memory. Weights that were replaced since the last
    time are packed again."""
    parts = [part for owner in module.modules() for part in (owner, *vars(owner).values())]
    packable = [part for part in parts if isinstance(part, Fused | Experts)]
    done, total = 0, sum(part.nbytes for part in packable)
    for part in packable:
        if isinstance(part, Experts):
            part.packed = pack_experts(part.gate_up_proj, part.down_proj)
        else:
            part.packed = pack(*part.weights, precise=part.precise)
        done += part.nbytes
        if progress:
            progress(done, total)


def pack(*weights: Weight, precise: bool = False) -> Packed:
    """Weights [out, in] of the same input as one product; a `precise` one gives fp32 that never was bf16."""
    return Packed(_product(weights, precise), tuple(weight.shape[0] for weight in weights))


def pack_experts(gate_up: Weight, down: Weight) -> PackedExperts:
    """gate_up [E, 2I, H] and down [E, H, I]."""
    count, width = down.shape[0], down.shape[-1]
    if count > FEW_EXPERTS:
        products = ([_product((weight[expert],)) for expert in range(count)] for weight in (gate_up, down))
        return PackedExperts(count, *products)

    def gates_first(x: Tensor) -> Tensor:
        """[E, 2I, ...] -> [2 * E * I, ...]: all gates, then all ups."""
        return x.unflatten(1, (2, width)).transpose(0, 1).flatten(0, 2)

    def side_by_side(x: Tensor) -> Tensor:
        """[E, H, n] -> [H, E * n]"""
        return x.transpose(0, 1).flatten(1)

    return PackedExperts(count, [_joined(gate_up, gates_first)], [_joined(down, side_by_side)])


def _joined(weight: Weight, arrange: Callable[[Tensor], Tensor]) -> Product:
    """All experts as one matrix, arranged from [E, out, in]."""
    if int4 := _int4_of_one_group([weight]):
        codes = torch.cat([unpack_nibbles(part.qweight).transpose(1, 2) for part in int4], dim=1).int()
        steps = torch.cat([part.scales.transpose(1, 2) for part in int4], dim=1).float()  # [E, out, groups]
        found = _int4_product(arrange(codes), arrange(steps).t())
        if found is not None:
            return found
    return _dense_product(arrange(as_tensor(weight)))


def _product(weights: Sequence[Weight], precise: bool = False) -> Product:
    if not precise and (int4 := _int4_of_one_group(weights)):
        codes = torch.cat([unpack_nibbles(part.qweight).t() for part in int4]).int()
        found = _int4_product(codes, torch.cat([part.scales for part in int4], dim=1).float())
        if found is not None:
            return found
    if not precise and len(weights) == 1 and isinstance(weights[0], Int8Row):
        return _dense_product(weights[0].weight, weights[0].weight_scale.float().reshape(-1))
    return _dense_product(torch.cat([as_tensor(weight) for weight in weights]), precise=precise)


def _int4_of_one_group(weights: Sequence[Weight]) -> list[Int4] | None:
    """The weights, joined ones in their parts, if all of them are INT4 with groups of one size."""
    parts = [part for weight in weights for part in (weight.parts if isinstance(weight, Joined) else [weight])]
    int4 = [part for part in parts if isinstance(part, Int4)]
    return int4 if len(int4) == len(parts) and len({part.group for part in int4}) == 1 else None


def _int4_product(codes: Tensor, scales: Tensor) -> Product | None:
    """codes [out, in] int32, scales [groups, out] fp32; None where the kernel cannot take them or does not hold."""
    outputs, inputs = codes.shape
    if outputs % INT4_OUTPUTS:
        return None
    try:
        product = Int4Product.of(codes, scales.contiguous())

        def trial(width: int) -> Product:
            return Int4Product.of(cancelling_codes(outputs, width), torch.ones(width // product.group, outputs))

        return _if_held(f"int4 by {product.group}", outputs, inputs, product, trial)
    except (AttributeError, RuntimeError):  # an internal operation of torch, which not every build has
        return None


def _dense_product(dense: Tensor, row_scale: Tensor | None = None, precise: bool = False) -> Product:
    """The fastest product that holds for a plain [out, in] weight, or for INT8 codes with a scale per row."""
    outputs, inputs = dense.shape
    found: Product | None = None
    if outputs <= SMALL and row_scale is None:
        found = _if_held("small", outputs, inputs, SmallProduct.of(dense))
    if found is None and (dense.numel() <= CACHED or row_scale is not None or precise) and _fp16_is_there():
        found = _if_held("fp16", outputs, inputs, Fp16Product.of(dense.float(), row_scale))
    if found is None and row_scale is None and not precise and _sum_of_two(dense):
        found = _bf16_product(dense)
    return found or TiledProduct(dense.float() if row_scale is None else dense.float() * row_scale[:, None])


def _bf16_product(dense: Tensor) -> Product | None:
    if not _bf16_is_there():
        return None
    outputs, inputs = dense.shape

    def trial(width: int) -> Product:
        return Bf16Product.of(cancelling_weight(outputs, width))

    return _if_held("bf16", outputs, inputs, Bf16Product.of(dense), trial, EVERY_COUNT)


def _if_held(
    kind: str,
    outputs: int,
    inputs: int,
    product: Product | None,
    trial: Callable[[int], Product] | None = None,
    counts: Sequence[int] = COUNTS,
) -> Product | None:
    """The product, if there is one and its rows are independent for this shape on this machine. `trial` makes one that
    shows it better, for a kernel that rounds its sums; it is told how many inputs the kernel has."""
    if product is None:
        return None
    width = inputs * getattr(product, "copies", 1)
    key = (kind, outputs, width)
    if key not in _held:
        _held[key] = (
            rows_independent(trial(width), cancelling_rows(width), counts)
            if trial
            else rows_independent(product, random_rows(inputs), counts)
        )
    return product if _held[key] else None


def _sum_of_two(dense: Tensor) -> bool:
    """Whether two bf16 numbers hold every value: they do for INT8 codes, and for FP8 with 16-bit scales."""
    high = dense.bfloat16().float()
    low = (dense.float() - high).bfloat16().float()
    return bool((high + low == dense).all())


@lru_cache
def _bf16_is_there() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@lru_cache
def _fp16_is_there() -> bool:
    """fbgemm is in torch's x86 builds only."""
    return "fbgemm" in torch.backends.quantized.supported_engines and hasattr(
        torch.ops.quantized, "linear_dynamic_fp16"
    )
