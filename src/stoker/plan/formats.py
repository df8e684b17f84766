"""Bytes of a weight in a storage format, scales and zero points included. Exact for the formats Stoker reads and for
MXFP4; `gguf:BITS` is an average over a file's mixture of blocks and says so by its name.
"""

from math import ceil, prod

from stoker.errors import RequestError

Shape = tuple[int, ...]

PLAIN = {"bf16": 2, "fp16": 2, "fp32": 4}
GGUF = "gguf:"
# bits of a weight without its scales: what "lower-bit" means where formats are compared
BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int8-row": 8, "fp8-b128": 8, "fp8-row": 8, "fp8-tensor": 8,
        "nvfp4": 4, "mxfp4": 4, "int4-g128": 4, "int4-g64": 4, "int4-g32": 4}  # fmt: skip


def weight_bytes(format_name: str, shape: Shape) -> int:
    """`shape` is (out, in) behind any leading dimensions, each of which is stored by itself (experts are)."""
    count = prod(shape)
    if format_name in PLAIN:
        return count * PLAIN[format_name]
    if format_name.startswith(GGUF):
        return ceil(count * float(format_name.removeprefix(GGUF)) / 8)
    if format_name not in BITS:
        raise RequestError(f"{format_name} is no weight format; known: {', '.join(BITS)} and {GGUF}BITS.")
    if len(shape) < 2:
        raise RequestError(f"a weight of shape {list(shape)} is kept in 16 or 32 bit, not in {format_name}.")
    *lead, rows, columns = shape
    each = _matrix_bytes(format_name, rows, columns)
    return prod(lead) * each


def fits(format_name: str, shape: Shape) -> bool:
    """Whether a checkpoint would store this weight so: vectors and odd shapes stay in 16 bit."""
    if format_name in PLAIN or format_name.startswith(GGUF):
        return True
    if len(shape) < 2 or shape[-2] < 2:
        return False
    if format_name.startswith("int4"):
        return shape[-1] % _group(format_name) == 0 and shape[-2] % 32 == 0
    return not (format_name == "nvfp4" and shape[-1] % 16) and not (format_name == "mxfp4" and shape[-1] % 32)


def _matrix_bytes(format_name: str, rows: int, columns: int) -> int:
    if format_name in ("int8-row", "fp8-row"):  # and an fp32 scale per row
        return rows * columns + rows * 4
    if format_name == "fp8-tensor":
        return rows * columns + 4
    if format_name == "fp8-b128":  # and a bf16 scale per 128 x 128
        return rows * columns + 2 * ceil(rows / 128) * ceil(columns / 128)
    if format_name == "nvfp4":  # e4m3 scale per 16, two fp32 scales per weight: its own and its input's
        return rows * columns // 2 + rows * columns // 16 + 8
    if format_name == "mxfp4":  # an exponent per 32
        return rows * columns // 2 + rows * columns // 32
    groups = ceil(columns / _group(format_name))  # INT4: fp16 scale and 4-bit zero point per group
    return rows * columns // 2 + groups * rows * 2 + groups * rows // 2


def _group(format_name: str) -> int:
    return int(format_name.removeprefix("int4-g"))
