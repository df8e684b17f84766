"""What every weight format offers, and the value checks they share.

A format is a frozen dataclass whose fields are named like its tensors on disk: writing is reading backwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from stoker.errors import CheckpointError
from stoker.weights.formats.layout import Check, Layout, Parts, Shape
from stoker.weights.reader import DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}  # as safetensors headers spell them
# Scales are divisors while quantising, so a group, row or block of zeros needs one that is not zero.
SCALE_OF_ZEROS = 1.0


@dataclass(frozen=True, eq=False)
class WeightFormat(ABC):
    """A weight of logical shape (out, in), perhaps behind an expert dimension, as its file stores it."""

    CHECK: ClassVar[Check]  # dtypes and shapes, from `layout`

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], where: str) -> Self:
        """Wrap tensors as read from disk, refusing any whose dtype, shape or scales cannot be right."""
        cls.CHECK(_parts(tensors), where)
        weight = cls(**tensors)
        weight.check_values(where)
        return weight

    def tensors(self) -> dict[str, Tensor]:
        """Suffix -> tensor, exactly as on disk; optional tensors that were absent stay absent."""
        return {f.name: t for f in fields(self) if (t := getattr(self, f.name)) is not None}

    def __getitem__(self, index: int | Tensor) -> Self:
        """One expert, or several, of a weight with an expert dimension."""
        return replace(self, **{name: tensor[index] for name, tensor in self.tensors().items()})

    @cached_property
    def _layout(self) -> Layout:
        return type(self).CHECK(_parts(self.tensors()), self.__class__.__name__)

    @property
    def name(self) -> str:
        return self._layout.format

    @property
    def shape(self) -> Shape:
        return self._layout.shape

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors().values())

    @abstractmethod
    def check_values(self, where: str) -> None:
        """Refuse scales that no quantiser writes (weights are not checked: too many); part of `from_tensors`."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight as [.., out, in]: the reference, computed in fp32 and rounded to `dtype` last."""


def expect_finite(scale: Tensor | None, suffix: str, where: str) -> None:
    """Refuse NaN and Inf: one such scale would turn a group of weights, and then every logit, into NaN."""
    if scale is None or scale.is_meta:
        return
    bad = ~torch.isfinite(scale.float())
    if count := int(bad.sum()):
        first = bad.nonzero()[0].tolist()
        raise CheckpointError(
            f"{where}: {count} of {scale.numel()} values of {suffix} are NaN or Inf, the first at {first}; "
            f"fetch this file again, and if it stays so the checkpoint itself is broken."
        )


def expect_quantizable(weight: Tensor, kind: str, *, multiple_of: int = 1, where: str = "weight") -> None:
    """Refuse what no quantiser takes: the input must be a finite float matrix whose rows divide into whole groups."""
    if weight.ndim < 2 or weight.numel() == 0 or not weight.is_floating_point():
        raise CheckpointError(f"{where}: {kind} quantises a float matrix, got {weight.dtype} {list(weight.shape)}.")
    if weight.shape[-1] % multiple_of:
        raise CheckpointError(
            f"{where}: {weight.shape[-1]} inputs do not divide into whole {kind} groups of {multiple_of}; "
            f"keep this layer in 16 bit or choose a smaller group."
        )
    if not weight.is_meta and not bool(torch.isfinite(weight).all()):
        raise CheckpointError(f"{where}: the weight holds NaN or Inf, which {kind} cannot represent.")


def _parts(tensors: Mapping[str, Tensor]) -> Parts:
    return {suffix: (DTYPE_NAMES.get(t.dtype, str(t.dtype)), tuple(t.shape)) for suffix, t in tensors.items()}
