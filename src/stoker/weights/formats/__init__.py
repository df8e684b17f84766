"""On-disk weight formats: one file each, read and written bit for bit, with a reference `dequantize`.

`layout`, `quant_config` and `rules` are plain Python, so that a checkpoint can be judged from its headers
on an install without torch; everything that touches values needs torch and is imported on demand.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.weights.formats.base import WeightFormat

# Format name, as `inspect` prints it -> the module and class that read and write it.
FORMATS: dict[str, tuple[str, str]] = {
    "bf16": ("plain", "Plain"),
    "fp16": ("plain", "Plain"),
    "fp32": ("plain", "Plain"),
    "int4-g128": ("int4", "Int4"),
    "int4-g64": ("int4", "Int4"),
    "int4-g32": ("int4", "Int4"),
    "int4-ct-g128": ("int4_ct", "Int4Ct"),
    "int4-ct-g64": ("int4_ct", "Int4Ct"),
    "int4-ct-g32": ("int4_ct", "Int4Ct"),
    "int4-ct-row": ("int4_ct", "Int4Ct"),
    "int8-row": ("int8", "Int8Row"),
    "fp8-b128": ("fp8", "Fp8Block"),
    "fp8-row": ("fp8", "Fp8Row"),
    "fp8-tensor": ("fp8", "Fp8Tensor"),
    "nvfp4-ct": ("nvfp4", "Nvfp4"),
    "nvfp4-modelopt": ("nvfp4", "Nvfp4ModelOpt"),
}


def format_class(name: str) -> type[WeightFormat]:
    """The class of a format named in `FORMATS`; this is where torch gets imported."""
    module, cls = FORMATS[name]
    found: type[WeightFormat] = getattr(import_module(f"{__name__}.{module}"), cls)
    return found
