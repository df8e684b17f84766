"""Kernels of a prompt as the shapes of Qwen3.5-122B-A10B launch them, for compiling without a GPU."""

from typing import Any

import triton.language as tl

from stoker.backends.gpu.kernels import (
    prefill_attention,
    prefill_deltanet,
    prefill_experts,
    prefill_linear,
    prefill_rows,
)
from stoker.backends.gpu.packed import Kind
from tools.compiled_kernels import Variant

FLOATS = ["y", "ab", "conv", "decay", "bias", "ends", "state", "norm", "q_norm", "k_norm", "cos", "sin"]
FLOATS += ["row_scales", "scale", "weights", "gates", "logits"]
HALVES = ["x", "q", "k", "from_state", "own", "scores", "inputs", "mixed", "out", "hidden", "outputs", "shared"]
HALVES += ["normed", "ordered", "table", "keys", "values", "key_scales", "value_scales"]
TYPES = {f"{name}_ptr": "*fp32" for name in FLOATS} | {f"{name}_ptr": "*bf16" for name in HALVES}
SCALES = {Kind.INT4: "*fp16", Kind.NVFP4: "*i32"}
PLAIN = {"enable_fp_fusion": False}
MATH = {"DOT": tl.bfloat16, **PLAIN}
PTX = {"PTX": True, **MATH}
HIDDEN, INTER, TOP_K, WIDTH = 3072, 1024, 8, 20608
DELTA = {"KEY_HEADS": 16, "HEADS": 64, "K": 128, "V": 128}


def every_prefill_variant() -> list[Variant]:
    """All formats at the model's sizes."""
    found = [_linear(), *(_unpack(kind) for kind in Kind if kind is not Kind.BF16)]
    found += [variant for kind in Kind for tile in prefill_experts.TILES for variant in _experts(kind, tile)]
    return [*found, *_rest()]


def each_prefill_kernel() -> list[Variant]:
    """Every kernel once."""
    return [_linear(), _unpack(Kind.INT4), *_experts(Kind.INT4), *_rest()]


def _types(kind: Kind) -> dict[str, str]:
    packed = "*bf16" if kind is Kind.BF16 else "*i16"
    return {**TYPES, "packed_ptr": packed, "scales_ptr": SCALES.get(kind, "*fp32")}


def _linear() -> Variant:
    values = {"OUT": WIDTH, "ROWS": WIDTH, "IN": HIDDEN, "ROW_SCALES": False, "ADD": False}
    own = prefill_linear
    return Variant(
        "prefill_linear", own.prefill_linear_kernel, {**values, **own.HOPPER, **MATH}, _types(Kind.BF16), own.AMD,
        own.LITTLE,
    )  # fmt: skip


def _unpack(kind: Kind) -> Variant:
    values = {"KIND": int(kind), "ROWS": WIDTH, "GROUPS": HIDDEN // 128, "COUNT": prefill_linear.UNPACKED}
    return Variant(f"unpack {kind.name}", prefill_linear.unpack_kernel, {**values, "num_warps": 4, **PTX}, _types(kind))


def _experts(kind: Kind, tile: int = 64) -> list[Variant]:
    common: dict[str, Any] = {"KIND": int(kind), "TILE": tile, **prefill_experts.NVIDIA, **PTX}
    gate_up = {"ROWS": 2 * INTER, "IN": HIDDEN, "TOP_K": TOP_K, **common}
    down = {"ROWS": HIDDEN, "IN": INTER, **common}
    first, second = prefill_experts.prefill_gate_up_kernel, prefill_experts.prefill_down_kernel
    return [
        Variant(f"prefill_gate_up {kind.name} {tile}", first, gate_up, _types(kind), prefill_experts.AMD),
        Variant(f"prefill_down {kind.name} {tile}", second, down, _types(kind), prefill_experts.AMD),
    ]


def _rest() -> list[Variant]:
    tiles = {"EXPERTS": 256, "PADDED": 256, "TILE": 64}
    scanned = {"BLOCK": prefill_experts.SCANNED, "num_warps": 4, **PLAIN}
    return [
        Variant("count", prefill_experts.count_kernel, scanned, TYPES),
        Variant("pair_tiles", prefill_experts.pair_tiles_kernel, {**tiles, **scanned}, TYPES),
        *_deltanet(),
        *_attention(fp8=False),
        *_attention(fp8=True),
        *_rows(),
    ]


def _deltanet() -> list[Variant]:
    own = prefill_deltanet
    common = {**DELTA, "WIDTH": WIDTH, "TAPS": 4}
    conv = {**common, "KEEPS": True, "L2": 1e-6, "SCALE": 128**-0.5, **own.ROWS, **PLAIN}
    prepare = {**DELTA, "AB_WIDTH": WIDTH, "AB_AT": 20480, **own.PREPARE, **MATH}
    scan = {"HEADS": 64, "K": 128, "V": 128, "KEEPS": True, **own.SCAN, **MATH}
    return [
        Variant("conv", own.conv_kernel, conv, {**TYPES, "snapshots_ptr": "*bf16"}),
        Variant("prepare", own.prepare_kernel, prepare, TYPES),
        Variant("scan", own.scan_kernel, scan, {**TYPES, "snapshots_ptr": "*fp32"}, own.SCAN_AMD, own.SCAN_LITTLE),
        Variant("gate", own.gate_kernel, {**common, "EPS": 1e-6, **own.ROWS, **PLAIN}, TYPES),
    ]


def _attention(fp8: bool) -> list[Variant]:
    own = prefill_attention
    heads = {"WIDTH": 17408, "HEADS": 32, "KV_HEADS": 2, "D": 256, "Q_WIDTH": 512, "PAGE": 64, "FP8_PAGES": fp8}
    write = {"HALF": 32, "EPS": 1e-6, "MAX": 448.0, "LEAST": 2.0**-100, "STORED": tl.bfloat16, "ROWS": own.WRITTEN}
    pages = "*u8" if fp8 else "*bf16"
    types = {**TYPES, "keys_ptr": pages, "values_ptr": pages, "table_ptr": "*i32"}
    name = "FP8 keys" if fp8 else "BF16 keys"
    values = {**heads, "SCALE": 256**-0.5 * own.LOG2_E, **own.HOPPER, **MATH}
    return [
        Variant(f"write {name}", own.write_kernel, {**heads, **write, "num_warps": 4, **PLAIN}, types),
        Variant(
            f"prefill_attention {name}", own.prefill_attention_kernel, values, types, own.AMD, own.LITTLE
        ),
    ]  # fmt: skip


def _rows() -> list[Variant]:
    own = prefill_rows
    sizes = {"H": HIDDEN, "PADDED": 4096, "ROWS": own.ROWS, "EPS": 1e-6, "num_warps": 4, **PLAIN}
    chosen = {"EXPERTS": 256, "PADDED": 256, "TOP_K": TOP_K, "SHARED": True, "RENORMALIZE": True, "ROWS": own.CHOSEN}
    return [
        Variant("norm", own.norm_kernel, {**sizes, "EMBED": True, "ORDERED": True}, TYPES),
        Variant("combine", own.combine_kernel, {**sizes, "TOP_K": TOP_K, "SHARED": True}, TYPES),
        Variant("choose", own.choose_kernel, {**chosen, "num_warps": 4, **PLAIN}, {**TYPES, "shared_ptr": "*fp32"}),
    ]
