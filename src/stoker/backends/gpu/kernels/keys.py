# Triton types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment,var-annotated"
"""Queries and keys between projection and attention: norm and rope, and keys and values as FP8 pages store them."""

import triton
import triton.language as tl

from stoker.backends.gpu.kernels.products import row_sums


@triton.jit
def rotated(x_ptr, at, ok, d, norm_ptr, cos_ptr, sin_ptr, position, HALF: tl.constexpr, D: tl.constexpr,
             EPS: tl.constexpr, STORED: tl.constexpr):  # fmt: skip
    """Rows [n, D] of x, normed and rotated, rounded to STORED after each. `at` and `position` are [n, 1]."""
    TURNED: tl.constexpr = triton.next_power_of_2(2 * HALF)
    x = tl.load(x_ptr + at + d, mask=ok, other=0.0)
    scale = tl.load(norm_ptr + d + at * 0)  # as many times as there are rows: cheaper than to exchange lanes
    # what turns is a tile of its own, often a quarter of the columns; its other half comes from the cache
    t = tl.arange(0, TURNED)[None, :]
    turns = t < 2 * HALF
    other = tl.where(t < HALF, t + HALF, tl.where(turns, t - HALF, t))
    near = tl.load(x_ptr + at + t, mask=ok, other=0.0)
    far = tl.load(x_ptr + at + other, mask=ok, other=0.0)
    angle = position * HALF + t % HALF
    cos = tl.load(cos_ptr + angle, mask=ok & turns, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=ok & turns, other=0.0)
    inverse = 1.0 / tl.sqrt(row_sums(x * x, D) / D + EPS)
    near = (near * inverse * tl.load(norm_ptr + t)).to(STORED).to(tl.float32)
    far = (far * inverse * tl.load(norm_ptr + other)).to(STORED).to(tl.float32)
    turned = (near * cos + tl.where(t < HALF, -far, far) * sin).to(STORED)
    if TURNED == D:
        return turned
    wide = tl.broadcast_to(turned[:, None, :], (x.shape[0], D // TURNED, TURNED))
    return tl.where(d < TURNED, tl.reshape(wide, x.shape), (x * inverse * scale).to(STORED))


@triton.jit
def _to_e4m3(x):
    """Codes of the nearest E4M3 values as int32, ties to even; |x| <= 448."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6 the steps are 2^-9: adding 2^23 steps rounds to whole ones
    small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(tl.abs(x) < 0.015625, small, normal)
    return tl.where(bits < 0, code | 0x80, code)


@triton.jit
def store_fp8(pages_ptr, scales_ptr, place, d, value, ok, KV_HEADS: tl.constexpr, D: tl.constexpr,
               MAX: tl.constexpr, LEAST: tl.constexpr):  # fmt: skip
    """As ops.attention.write_pages: a scale per row, values over the scale as stored."""
    step = tl.maximum(tl.max(tl.abs(value), 1)[:, None] / MAX, LEAST).to(scales_ptr.dtype.element_ty)
    scaled = tl.minimum(tl.maximum(value / step.to(tl.float32), -MAX), MAX)
    tl.store(scales_ptr + place, step, mask=ok)
    tl.store(pages_ptr + place.to(tl.int64) * D + d, _to_e4m3(scaled).to(tl.uint8), mask=ok)
