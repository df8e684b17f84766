"""Every kernel as a step at the shapes of Qwen3.5-122B-A10B launches it, for compiling without a GPU."""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from benchmarks.gpu import accept_kernels
from stoker.backends.gpu.kernels import (
    attention,
    attention_join,
    deltanet,
    drafter,
    experts,
    linear,
    route,
    rows,
)
from stoker.backends.gpu.packed import Kind
from tools.compiled_kernels import Variant
from tools.prefill_variants import each_prefill_kernel, every_prefill_variant

TOP_K = 8


@dataclass(frozen=True)
class Shape:
    """Sizes that decide how long a kernel compiles; heads are those of the model in both."""

    hidden: int
    inter: int
    projected: int  # inputs of the output projections
    rows: int  # of the input projections


MODEL = Shape(3072, 1024, 8192, 20608)
SMALL = Shape(512, 256, 4096, 1024)  # the same code paths, compiled faster: for tests
HEADS = attention.Heads(32, 2, 256, gated=True)
DELTA = {"KEY_HEADS": 16, "HEADS": 64, "K": 128, "V": 128, "TAPS": 4}
MATH = {"PTX": True, "DOT": tl.bfloat16, "PDL": True, "enable_fp_fusion": False}
PLAIN = {"PDL": True, "enable_fp_fusion": False}
FLOATS = [
    "ab",
    "scratch",
    "y",
    "partial",
    "squares",
    "next_scale",
    "logits",
    "rms",
    "weights",
    "shared",
    "outputs",
    "state",
    "gates",
    "conv",
    "decay",
    "bias",
    "norm",
    "q_norm",
    "k_norm",
    "cos",
    "sin",
    "sums",
    "highest",
    "totals",
    "values",
    "last",
    "embedding",
]
HALVES = ["x", "scaled", "hidden", "stream", "out", "inputs", "keys", "table", "joined"]
TYPES = {f"{name}_ptr": "*fp32" for name in FLOATS} | {f"{name}_ptr": "*bf16" for name in HALVES}
SCALES = {Kind.INT4: "*fp16", Kind.NVFP4: "*i32"}


def every_variant() -> list[Variant]:
    """All formats, one and 16 tokens, at the model's sizes."""
    found = []
    for tokens in (1, 16):
        found += [_linear(MODEL, kind, tokens) for kind in Kind]
        found += [
            _out(MODEL, Kind.INT4, tokens),
            _head(MODEL, Kind.BF16, tokens),
            _head(MODEL, Kind.INT8, tokens),
            _route(MODEL, tokens),
            *_experts(MODEL, tokens, Kind.INT4, Kind.BF16),
            *_experts(MODEL, tokens, Kind.INT4, Kind.FP8),
            *_experts(MODEL, tokens, Kind.NVFP4, Kind.NVFP4),
        ]
    return [*found, *_formless(MODEL), *every_prefill_variant()]


def each_kernel(amd: bool = False) -> list[Variant]:
    """Every kernel at small sizes, every format once; for AMD, whose compiler takes longer, fewer formats."""
    if amd:
        products = [_linear(SMALL, Kind.NVFP4, 1), _head(SMALL, Kind.INT8, 1)]
        experts_ = _experts(SMALL, 16, Kind.INT4, Kind.INT4)
    else:
        products = [_linear(SMALL, Kind.NVFP4, 1), _out(SMALL, Kind.INT4, 16), _head(SMALL, Kind.INT8, 1)]
        experts_ = _experts(SMALL, 16, Kind.INT4, Kind.FP8)
    found = [*products, _route(SMALL, 16), *experts_, *_formless(SMALL), *each_prefill_kernel()]
    return [variant for variant in found if not (amd and variant.values.get("FP8_PAGES"))]


def _formless(shape: Shape) -> list[Variant]:
    tiles = {"PADDED": 1024, "num_warps": 4, **PLAIN}
    return [
        Variant("tiles", route.tiles_kernel, tiles, TYPES),
        _deltanet(shape),
        _attention(fp8=False),
        _attention(fp8=True),
        _short_attention(),
        _join(),
        *_rows(shape),
        *_drafter(),
    ]


def _weight(kind: Kind, prefix: str = "") -> dict[str, str]:
    return {
        f"{prefix}packed_ptr": "*bf16" if kind is Kind.BF16 else "*i16",
        f"{prefix}scales_ptr": SCALES.get(kind, "*fp32"),
        f"{prefix}row_scales_ptr": "*fp32",
    }


def _linear(
    shape: Shape, kind: Kind, tokens: int, rows_: int = 0, inputs: int = 0, output: int = 0, name: str = "linear"
) -> Variant:
    rows_, inputs, stream = rows_ or shape.rows, inputs or shape.hidden, output == linear.STREAM.value
    parts = shape.hidden // 16
    values: dict[str, Any] = {
        "OUT": rows_, "KIND": int(kind), "ROWS": rows_, "IN": inputs, "OUTPUT": output, "LOGITS": False,
        "NORM": not stream, "PARTS": parts, "PADDED": triton.next_power_of_2(parts), "EPS": 1e-6,
        **linear.launch_shape(tokens, rows_, inputs, kind), **MATH,
    }  # fmt: skip
    types = {**TYPES, **_weight(kind), **({"y_ptr": "*bf16"} if stream else {})}
    return Variant(f"{name} {kind.name} T={tokens}", linear.linear_kernel, values, types)


def _out(shape: Shape, kind: Kind, tokens: int) -> Variant:
    return _linear(shape, kind, tokens, shape.hidden, shape.projected, linear.STREAM.value, "out")


def _head(shape: Shape, kind: Kind, tokens: int) -> Variant:
    return _linear(shape, kind, tokens, 248320, shape.hidden, linear.BEST.value, "head")


def _route(shape: Shape, tokens: int) -> Variant:
    values = {
        "EXPERTS": 256, "PADDED": 256, "TOP_K": TOP_K, "PAIRS_PADDED": TOP_K * tokens if tokens > 1 else 1,
        "SHARED": True, "RENORMALIZE": True, "PADS": tokens > 1, "EPS": 1e-6,
        "HIDDEN_PADDED": triton.next_power_of_2(shape.hidden),
        "KIND": int(Kind.BF16), "ROWS": 288, "IN": shape.hidden, **route.launch_shape(tokens, shape.hidden, Kind.BF16),
        **MATH,
    }  # fmt: skip
    return Variant(f"route T={tokens}", route.route_kernel, values, {**TYPES, **_weight(Kind.BF16)})


def _experts(shape: Shape, tokens: int, kind: Kind, shared: Kind) -> list[Variant]:
    common = {
        "KIND": int(kind), "SHARED_KIND": int(shared), "TOP_K": TOP_K,
        "ONE_TOKEN": tokens == 1, **MATH,
    }  # fmt: skip
    gate_up = {
        "ROWS": 2 * shape.inter,
        "SHARED_ROWS": 2 * shape.inter,
        "IN": shape.hidden,
        "EPS": 1e-6,
        "PADDED": triton.next_power_of_2(shape.hidden),
    }
    down = {"SHARED": True, "ROWS": shape.hidden, "OUT": shape.hidden, "IN": shape.inter}
    types = {**TYPES, **_weight(kind), **_weight(shared, "shared_")}
    name = f"{kind.name}+{shared.name} T={tokens}"
    return [
        Variant(
            f"gate_up {name}", experts.gate_up_kernel,
            {**common, **gate_up, **experts.launch_shape(tokens, shape.hidden, True, (kind, shared))}, types,
        ),
        Variant(
            f"down {name}", experts.down_kernel,
            {**common, **down, **experts.launch_shape(tokens, shape.inter, False, (kind, shared))}, types,
        ),
    ]  # fmt: skip


def _deltanet(shape: Shape) -> Variant:
    values = {
        **DELTA, "WIDTH": shape.rows, "AB_WIDTH": shape.rows, "AB_AT": 20480,
        "EPS": 1e-6, "L2": 1e-6, "SCALE": 128**-0.5,
        "num_warps": deltanet.warps(128), "maxnreg": 168, **PLAIN,
    }  # fmt: skip
    return Variant("deltanet", deltanet.deltanet_kernel, values, TYPES)


def _heads() -> dict[str, Any]:
    return {
        "WIDTH": HEADS.width, "HEADS": HEADS.count, "D": HEADS.dim, "Q_WIDTH": 2 * HEADS.dim,
        "FOLD": 1, "WHOLE": False, "WINDOW": 0,
    }  # fmt: skip


def _drafter() -> list[Variant]:
    """A layer that sees its last 4,096 keys, and the context of all six."""
    heads = {"WIDTH": 6144, "HEADS": 32, "KV_HEADS": 8, "D": 128, "Q_WIDTH": 128, "HALF": 64, "SCALE": 128**-0.5}
    block = _attention(fp8=False)
    values = {**block.values, **heads, "WINDOW": 4096}
    context = {"LAYERS": 6, "KV_HEADS": 8, "D": 128, "HALF": 64, "PAGE": 64, "EPS": 1e-6, "num_warps": 4, **PLAIN}
    types = {**TYPES, "values_ptr": "*bf16", "norms_ptr": "*fp32"}
    return [
        Variant("attention of a window", attention.attention_kernel, values, block.types, block.amd, block.little),
        _short_attention("attention of a short window", {**heads, "WINDOW": 4096, "PARTS": 1}),
        Variant("remember", drafter.remember_kernel, context, types),
        Variant(
            "swiglu", drafter.swiglu_kernel,
            {"INTER": 9216, "COLUMNS": drafter.COLUMNS, "num_warps": 4, **PLAIN}, TYPES,
        ),
    ]  # fmt: skip


def _short_attention(name: str = "attention of a short context", changes: dict[str, Any] | None = None) -> Variant:
    """Every leaf a program of its own, a quarter of the columns each."""
    split = _attention(fp8=False)
    values = {**split.values, "LEAVES": 1, "FOLD": 4, "PARTS": 4, "JOIN": True, **attention.UNSTAGED}
    amd = {**split.amd, "LEAVES": 1, "FOLD": 8}
    return Variant(name, attention.attention_kernel, values | (changes or {}), split.types, amd)


def _attention(fp8: bool) -> Variant:
    values = {
        **_heads(), "KV_HEADS": HEADS.kv_count, "HALF": 32, "EPS": 1e-6, "SCALE": 256**-0.5, "PAGE": 64, "LEAVES": 4,
        "PARTS": 1, "GROUP_PADDED": 16, "FP8_PAGES": fp8, "JOIN": False, "MAX": 448.0, "LEAST": 2.0**-100,
        "STORED": tl.bfloat16, **attention.NVIDIA, **(attention.UNSTAGED if fp8 else attention.STAGED), **MATH,
    }  # fmt: skip
    pages = "*u8" if fp8 else "*bf16"
    types = {**TYPES, "keys_ptr": pages, "values_ptr": pages}
    types |= dict.fromkeys(("key_scales_ptr", "value_scales_ptr"), "*bf16")
    return Variant(
        f"attention {'FP8' if fp8 else 'BF16'} keys", attention.attention_kernel, values, types,
        {**attention.AMD, **attention.UNSTAGED, "LEAVES": 8}, attention.UNSTAGED,
    )  # fmt: skip


def _join() -> Variant:
    shape = {"KEYS": 256, "RUN": attention.RUN, **attention.JOIN}
    return Variant("join", attention_join.join_kernel, {**_heads(), **shape, **PLAIN}, TYPES)


def _rows(shape: Shape) -> list[Variant]:
    padded = triton.next_power_of_2(shape.hidden)
    common = {"H": shape.hidden, "num_warps": 4, **PLAIN}
    block = {"ROWS": 3, "PADDED": 4, "num_warps": 1, **PLAIN}
    return [
        Variant("begin", rows.begin_kernel, {**common, "EMBED": True, "UNITS_PADDED": padded // 16}, TYPES),
        Variant(
            "mtp_inputs", rows.mtp_inputs_kernel, {**common, "PADDED": padded, "EPS": 1e-6},
            {**TYPES, "hidden_ptr": "*fp32"},
        ),
        Variant(
            "best", rows.best_kernel,
            {"COUNT": 15520, "VOCAB": 248320, "BLOCK": rows.BEST_BLOCK, "num_warps": 16, **PLAIN}, TYPES,
        ),
        Variant("accept", accept_kernels.accept_kernel, {**block, "ASSUMED": False}, {"last_ptr": "*i64"}),
        Variant("advance", accept_kernels.advance_kernel, {**block, "DRAFTS": True}, {}),
    ]  # fmt: skip
