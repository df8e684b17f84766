"""Packed products keep the weight's exact values, and a row's bits do not depend on the rows beside it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stoker.backends.network.linear import Weight, as_tensor, tiled
from stoker.backends.network.packing import pack as packing
from stoker.backends.network.packing.pack import pack
from stoker.backends.network.packing.products import Bf16Product, Fp16Product, Int4Product, SmallProduct, TiledProduct
from stoker.backends.network.packing.trial import (
    EVERY_COUNT,
    cancelling_rows,
    cancelling_weight,
    random_rows,
    rows_independent,
)
from stoker.weights.formats.fp8 import Fp8Block
from stoker.weights.formats.int4 import Int4
from stoker.weights.formats.int8 import Int8Row
from tests.backends.network.test_operations import assert_rows_independent

WEIGHTS: dict[str, Callable[[], tuple[Weight, ...]]] = {
    "int4 with bf16 scales": lambda: (Int4.quantize(torch.randn(192, 256), scale_rounding="fp16+bf16"),),
    "int4 with fp16 scales": lambda: (Int4.quantize(torch.randn(192, 256)),),
    "int4 in groups of 32": lambda: (Int4.quantize(torch.randn(64, 96), group=32),),
    "two int4 as one": lambda: tuple(Int4.quantize(torch.randn(n, 128)) for n in (64, 128)),
    "int8": lambda: (Int8Row.quantize(torch.randn(300, 200)),),
    "fp8": lambda: tuple(Fp8Block.quantize(0.02 * torch.randn(n, 384)) for n in (128, 128)),
    "fp8, large": lambda: (Fp8Block.quantize(torch.randn(512, 384)),),
    "bf16": lambda: (torch.randn(700, 384).bfloat16(),),
    "bf16 router": lambda: (torch.randn(16, 384).bfloat16(), torch.randn(1, 384).bfloat16()),
    "int4 of odd outputs": lambda: (Int4.quantize(torch.randn(40, 128)),),
}
KINDS = {
    "int4 with bf16 scales": Int4Product,
    "int4 with fp16 scales": Int4Product,
    "int8": Fp16Product,
    "fp8": Fp16Product,
    "fp8, large": Bf16Product,
    "bf16": Bf16Product,
    "bf16 router": SmallProduct,
}


def values(weights: tuple[Weight, ...]) -> Tensor:
    return torch.cat([as_tensor(weight).float() for weight in weights])


@pytest.mark.parametrize("name", WEIGHTS)
def test_rows_are_independent(name: str) -> None:
    weights = WEIGHTS[name]()
    product = pack(*weights).product
    assert_rows_independent(product, torch.randn(128, values(weights).shape[1]).bfloat16())


@pytest.mark.parametrize("name", WEIGHTS)
def test_values_are_those_of_the_checkpoint(name: str) -> None:
    """A row with a single one picks a column out of the weight: to the bit, or rounded once where results are bf16."""
    weights = WEIGHTS[name]()
    dense = values(weights)
    out = pack(*weights).product(torch.eye(dense.shape[1], dtype=torch.bfloat16)[:128])
    assert torch.equal(out, dense.t()[:128].to(out.dtype))


@pytest.mark.parametrize("name", WEIGHTS)
def test_sums_are_those_of_fp32(name: str) -> None:
    weights = WEIGHTS[name]()
    dense = values(weights).double()
    x = torch.randn(20, dense.shape[1]).bfloat16()
    want = x.double() @ dense.t()
    error = (pack(*weights).product(x).double() - want).abs().max() / want.abs().max()
    assert error <= 2**-8  # one rounding to bf16 at most


def test_the_kinds_are_used_where_this_machine_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (packing._bf16_is_there() and packing._fp16_is_there()):
        pytest.skip("this torch lacks oneDNN's bf16 or fbgemm")
    monkeypatch.setattr(packing, "_held", {})
    monkeypatch.setattr(packing, "rows_independent", lambda *_: True)  # a processor may well fail a trial
    assert {name: type(pack(*WEIGHTS[name]()).product) for name in KINDS} == KINDS


def test_a_product_whose_rows_are_not_independent_is_found_out_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(700, 384).bfloat16()

    class Library(TiledProduct):
        """Rounds differently for three rows."""

        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) * (1.0 + 1e-6 * (x.shape[0] == 3))

    assert rows_independent(TiledProduct(weight.float()), random_rows(384))
    assert not rows_independent(Library(weight.float()), random_rows(384))
    monkeypatch.setattr(packing, "rows_independent", lambda *_: False)
    monkeypatch.setattr(packing, "_held", {})
    packed = pack(weight)
    assert isinstance(packed.product, TiledProduct)
    assert_rows_independent(packed.product, torch.randn(128, 384).bfloat16())


class CutDifferently(TiledProduct):
    """Rounds sums to bf16, and cuts them at a third if there are 117 or 100 rows."""

    copies, group = 1, 32

    @classmethod
    def of(cls, weight: Tensor, scales: Tensor | None = None) -> "CutDifferently":
        if scales is not None:
            weight = (weight - 8) * scales.repeat_interleave(cls.group, 0).t()
        return cls(weight.float())

    def __call__(self, x: Tensor) -> Tensor:
        third = x.shape[1] // 3
        cut = [tiled(x[:, part].float(), self.weight[:, part], 16) for part in (slice(third), slice(third, None))]
        wide = tiled(x.float(), self.weight, 16) if x.shape[0] not in (117, 100) else cut[0] + cut[1]
        return wide.bfloat16()


@pytest.mark.parametrize("inputs", [2048, 385])
def test_another_order_of_the_sum_shows_through_its_rounding(inputs: int) -> None:
    rows, x = cancelling_rows(inputs), torch.randn(128, inputs).bfloat16()
    product = CutDifferently.of(cancelling_weight(384, inputs))
    exact = rows.double() @ product.weight.double().t()
    assert exact.abs().max() <= 1e-9 * (rows.double().abs() @ product.weight.double().abs().t()).max()
    assert (product(rows[:117]) != product(rows)[:117]).float().mean() > 0.5
    plain = CutDifferently.of(torch.randn(384, inputs))
    assert (plain(x[:117]) != plain(x)[:117]).float().mean() < 0.001  # which a trial might miss
    assert not rows_independent(product, rows, EVERY_COUNT)
    assert rows_independent(TiledProduct(product.weight), rows, EVERY_COUNT)


def test_a_library_that_cuts_sums_differently_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_held", {})
    monkeypatch.setattr(packing, "_bf16_is_there", lambda: True)
    for name in ("Bf16Product", "Int4Product"):
        monkeypatch.setattr(packing, name, CutDifferently)
    for weight in (torch.randn(700, 384).bfloat16(), Int4.quantize(torch.randn(128, 384), group=32)):
        assert type(pack(weight).product) not in (CutDifferently, Bf16Product, Int4Product)
    assert not packing._held["bf16", 700, 384]
    assert not packing._held["int4 by 32", 128, 384]


def test_more_than_128_rows_are_taken_in_parts() -> None:
    packed = pack(torch.randn(96, 128).bfloat16())
    x = torch.randn(300, 128).bfloat16()
    whole = packed(x, x.dtype)
    assert torch.equal(whole[100:228], packed(x[100:228], x.dtype))
