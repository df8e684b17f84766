"""Packing a model: which of torch's kernels multiplies with each weight, and how the weight lies for it.

INT4 stays INT4, INT8 codes and small matrices become fp16, larger ones bf16, as the sum of two numbers where one does
not hold the value (FP8 with its scale). Values are those of the checkpoint, always, but for a DFlash drafter on a
processor that multiplies bf16 itself: there it is rounded to bf16, which changes guesses and never the output. A form
whose rows are not independent on this machine is not used.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from stoker.backends.cpu.dflash import DFlash
from stoker.backends.cpu.experts import Experts
from stoker.backends.cpu.linear import Fused
from stoker.backends.cpu.ops.linear import Weight, as_tensor
from stoker.backends.cpu.packing.packed import Packed, PackedExperts
from stoker.backends.cpu.packing.products import (
    Bf16Product,
    Fp16Product,
    Int4Product,
    Product,
    SmallProduct,
    TiledProduct,
)
from stoker.backends.cpu.packing.trial import (
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
    """Packs every projection and expert of a bf16 network in host memory, in place. Weights that were replaced since
    the last time are packed again."""
    rounded = isinstance(module, DFlash) and _fast_bf16()
    jobs = list(_jobs(module, pack_rounded if rounded else pack))
    done, total = 0, sum(nbytes for nbytes, _ in jobs)
    for nbytes, job in jobs:
        job()
        done += nbytes
        if progress:
            progress(done, total)


def _jobs(module: nn.Module, how: Callable[..., Packed]) -> Iterator[tuple[int, Callable[[], None]]]:
    """What there is to pack, with the bytes of its weights."""
    for part in module.modules():
        if isinstance(part, Experts):
            yield part.gate_up_proj.nbytes + part.down_proj.nbytes, partial(part.pack, pack_experts)
        for fused in vars(part).values():
            if isinstance(fused, Fused):
                yield sum(weight.nbytes for weight in fused.weights), partial(fused.pack, how)


def pack(*weights: Weight, precise: bool = False) -> Packed:
    """Weights [out, in] of the same input as one product; a `precise` one gives fp32 that never was bf16."""
    return Packed(_product(weights, precise), tuple(weight.shape[0] for weight in weights))


def pack_rounded(*weights: Weight, precise: bool = False) -> Packed:
    """The same, rounded to bf16."""
    found = _bf16_product(torch.cat([as_tensor(weight) for weight in weights]).bfloat16())
    if precise or found is None:
        return pack(*weights, precise=precise)
    return Packed(found, tuple(weight.shape[0] for weight in weights))


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
    int4 = [part for part in _int4_parts(weight) if part is not None]
    if len(int4) == len(_int4_parts(weight)) and len({part.group for part in int4}) == 1:
        codes = torch.cat([unpack_nibbles(part.qweight).transpose(1, 2) for part in int4], dim=1).int()
        steps = torch.cat([part.scales.transpose(1, 2) for part in int4], dim=1).float()  # [E, out, groups]
        found = _int4_product(arrange(codes), arrange(steps).t())
        if found is not None:
            return found
    return _dense_product(arrange(as_tensor(weight)))


def _product(weights: tuple[Weight, ...], precise: bool = False) -> Product:
    if precise:
        return _dense_product(torch.cat([as_tensor(weight) for weight in weights]), precise=True)
    int4 = [part for weight in weights for part in _int4_parts(weight)]
    whole = [part for part in int4 if part is not None]
    if len(whole) == len(int4) and len({part.group for part in whole}) == 1:
        codes = torch.cat([unpack_nibbles(part.qweight).t() for part in whole]).int()
        found = _int4_product(codes, torch.cat([part.scales for part in whole], dim=1).float())
        if found is not None:
            return found
    if len(weights) == 1 and isinstance(weights[0], Int8Row):
        return _dense_product(weights[0].weight, weights[0].weight_scale.float().reshape(-1))
    return _dense_product(torch.cat([as_tensor(weight) for weight in weights]))


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


def _parts(weight: Weight) -> list[Weight]:
    return list(weight.parts) if isinstance(weight, Joined) else [weight]


def _int4_parts(weight: Weight) -> list[Int4 | None]:
    return [part if isinstance(part, Int4) else None for part in _parts(weight)]


def _sum_of_two(dense: Tensor) -> bool:
    """Whether two bf16 numbers hold every value: they do for INT8 codes, and for FP8 with 16-bit scales."""
    high = dense.bfloat16().float()
    low = (dense.float() - high).bfloat16().float()
    return bool((high + low == dense).all())


@lru_cache
def _fast_bf16() -> bool:
    """Whether the processor multiplies bf16 itself."""
    asked = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return _bf16_is_there() and any(ask is not None and ask() for ask in asked)


@lru_cache
def _bf16_is_there() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@lru_cache
def _fp16_is_there() -> bool:
    """fbgemm is in torch's x86 builds only."""
    return "fbgemm" in torch.backends.quantized.supported_engines and hasattr(
        torch.ops.quantized, "linear_dynamic_fp16"
    )
