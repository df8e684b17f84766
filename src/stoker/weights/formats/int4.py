"""INT4 in groups along the inputs, as AutoRound and GPTQ publish it; symmetric only.

    w[o, i] = scales[i // group, o] * (nibble(i, o) - 8)

Scales are signed: quantisers put a group's extreme on -8, so about half the scales are negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from stoker.errors import CheckpointError
from stoker.weights.formats import layout
from stoker.weights.formats.base import WeightFormat, expect_finite, expect_quantizable
from stoker.weights.formats.layout import INT4_GROUPS

ZERO_POINT = 8
# GPTQ stores the zero point minus one, eight to a word: 0x77777777. Its v2 stores the zero point itself.
QZEROS = 0x77777777
QZEROS_V2 = 0x88888888 - (1 << 32)

ScaleRounding = Literal["fp16", "fp16+bf16", "short"]
# Candidate scales as fractions of extreme / 8. Above 1 the opposite end of the group clips less; below it the
# extreme itself clips and everything else gets finer steps.
CLIP_RATIOS = tuple((28 - i) / 25 for i in range(16))  # 1.12, 1.08, 1.04, 1.00, ... 0.52
SMALLEST_FP16 = 2.0**-24  # the scale of a group of zeros, and of one too small for fp16
CHUNK = 1 << 22  # elements searched at a time, which bounds the search's memory to about 100 MB


@dataclass(frozen=True, eq=False)
class Int4(WeightFormat):
    """Group-quantised INT4 with groups of 128, 64 or 32 consecutive inputs."""

    qweight: Tensor  # [.., in/8, out] int32; nibble j of word r, least significant first, is input 8r + j
    scales: Tensor  # [.., in/group, out] fp16, signed
    qzeros: Tensor | None = None  # [.., in/group, out/8] int32, every word 0x77777777
    g_idx: Tensor | None = None  # [.., in] int32, i // group

    CHECK: ClassVar[layout.Check] = staticmethod(layout.int4)

    @property
    def group(self) -> int:
        return self.qweight.shape[-2] * 8 // self.scales.shape[-2]

    def check_values(self, where: str) -> None:
        expect_finite(self.scales, "scales", where)
        if self.qzeros is not None and not self.qzeros.is_meta:
            _expect_symmetric(self.qzeros, where)
        if self.g_idx is not None and not self.g_idx.is_meta:
            in_order = torch.arange(self.g_idx.shape[-1], device=self.g_idx.device) // self.group
            if not bool((self.g_idx == in_order).all()):
                raise CheckpointError(
                    f"{where}: g_idx reorders the inputs (desc_act), and Stoker reads groups of consecutive "
                    f"inputs only; use a checkpoint quantised with desc_act false."
                )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        codes = unpack_nibbles(self.qweight).unflatten(-2, (-1, self.group))  # [.., in/group, group, out]
        w = (codes.float() - ZERO_POINT).mul_(self.scales.float().unsqueeze(-2))
        return w.flatten(-3, -2).transpose(-1, -2).to(dtype).contiguous()

    @classmethod
    def quantize(
        cls,
        weight: Tensor,
        *,
        group: int = 128,
        clip_search: bool = True,
        scale_rounding: ScaleRounding = "fp16",
        where: str = "weight",
    ) -> Self:
        """Round `weight` [.., out, in] to nearest, each group with the scale that loses least.

        Without `clip_search` the scale is extreme / -8, as AutoRound's round-to-nearest has it. "fp16+bf16"
        keeps to scales that both types hold exactly, so that a kernel may read them as either; "short" to scales of
        five significant bits, so that bf16 holds every weight exactly.
        """
        if group not in INT4_GROUPS:
            raise CheckpointError(f"{where}: INT4 groups hold 128, 64 or 32 inputs, not {group}.")
        expect_quantizable(weight, "INT4", multiple_of=group, where=where)
        *lead, n_out, n_in = weight.shape
        if n_out % 8:
            raise CheckpointError(
                f"{where}: INT4 packs zero points of 8 outputs into a word and {n_out} is no multiple of 8; "
                f"keep this layer in 16 bit."
            )
        groups = weight.reshape(-1, group)  # [lead * out * in/group, group]
        ratios = CLIP_RATIOS if clip_search else (1.0,)
        parts = [_quantize_groups(rows.float(), ratios, scale_rounding) for rows in groups.split(CHUNK // group)]
        codes = torch.cat([codes for codes, _ in parts]).reshape(*lead, n_out, n_in)
        scales = torch.cat([scale for _, scale in parts]).reshape(*lead, n_out, -1)
        if not bool(scales.isfinite().all()):
            raise CheckpointError(
                f"{where}: the largest weight is {float(weight.abs().max()):g}, beyond the {65504 * 8:,} "
                f"that INT4 with an fp16 scale can hold; keep this layer in 16 bit."
            )
        scales = scales.transpose(-1, -2).contiguous()  # [.., in/group, out]
        return cls(
            qweight=pack_nibbles(codes.transpose(-1, -2)),
            scales=scales,
            qzeros=torch.full((*scales.shape[:-1], n_out // 8), QZEROS, dtype=torch.int32, device=weight.device),
        )


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 [.., n, out] -> int32 words [.., n/8, out], the first code in the lowest bits."""
    nibbles = codes.unflatten(-2, (-1, 8)).int()  # [.., n/8, 8, out]
    words = torch.zeros_like(nibbles[..., 0, :], memory_format=torch.contiguous_format)
    for j in range(8):
        words |= nibbles[..., j, :] << 4 * j
    return words


def unpack_nibbles(words: Tensor) -> Tensor:
    """int32 words [.., r, out] -> uint8 codes [.., 8r, out]."""
    codes = torch.stack([(words >> 4 * j & 0xF).to(torch.uint8) for j in range(8)], dim=-2)  # [.., r, 8, out]
    return codes.flatten(-3, -2)


def round_scale(scale: Tensor, rounding: ScaleRounding) -> Tensor:
    """To fp16, never to zero. Rounding to fewer bits first leaves digits that fp16 keeps or cuts further."""
    if rounding == "fp16+bf16":
        scale = scale.bfloat16()
    elif rounding == "short":
        scale = five_bits(scale.float())
    rounded = scale.half()
    return torch.where(rounded == 0, torch.full_like(rounded, SMALLEST_FP16).copysign_(rounded), rounded)


def five_bits(x: Tensor) -> Tensor:
    """fp32 rounded to five significant bits: times a code, which has three, it fits the eight of bf16."""
    return ((x.view(torch.int32) + (1 << 18)) & ~((1 << 19) - 1)).view(torch.float32)


def _quantize_groups(w: Tensor, ratios: tuple[float, ...], rounding: ScaleRounding) -> tuple[Tensor, Tensor]:
    """Rows of `w` [n, group] are groups -> codes 0..15 as uint8 [n, group] and scales as fp16 [n]."""
    extreme = w.gather(-1, w.abs().argmax(-1, keepdim=True))  # [n, 1], with its sign
    best_scale = torch.empty_like(extreme, dtype=torch.float16)
    best_error = torch.full_like(extreme, torch.inf)
    for ratio in ratios:
        scale = round_scale(extreme * (-ratio / 8), rounding)
        error = (_levels(w, scale) * scale.float() - w).square_().sum(-1, keepdim=True)
        better = ~(error >= best_error)  # also where an infinite scale made it NaN: reported by the caller
        best_scale = torch.where(better, scale, best_scale)
        best_error = torch.where(better, error, best_error)
    codes = (_levels(w, best_scale) + ZERO_POINT).to(torch.uint8)
    return codes, best_scale.squeeze(-1)


def _levels(w: Tensor, scale: Tensor) -> Tensor:
    return (w / scale.float()).round_().clamp_(-8, 7)


def _expect_symmetric(qzeros: Tensor, where: str) -> None:
    wrong = qzeros != QZEROS
    if not (count := int(wrong.sum())):
        return
    if bool((qzeros == QZEROS_V2).all()):
        raise CheckpointError(
            f"{where}: qzeros are 0x88888888, which is zero point 8 as gptq_v2 stores it and 9 as GPTQ does; "
            f"Stoker reads GPTQ's, so save the checkpoint with checkpoint_format gptq."
        )
    first = int(qzeros[wrong][0]) & 0xFFFFFFFF
    raise CheckpointError(
        f"{where}: {count} of {qzeros.numel()} words of qzeros are not 0x77777777 (first: 0x{first:08x}), "
        f"so this is asymmetric INT4; Stoker reads symmetric INT4 only (sym true)."
    )
