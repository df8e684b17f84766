"""A plan in bytes is what is then allocated, to the byte, and says with numbers when it cannot be."""

from pathlib import Path

import pytest
import torch

from stoker.backends.cpu.decoder import Decoder
from stoker.backends.cpu.drafting import CpuDFlash, CpuMtp
from stoker.backends.cpu.load import load_drafter, load_model
from stoker.backends.cpu.measure import DrafterBytes, unit_bytes
from stoker.backends.cpu.recurrence import ring_size
from stoker.backends.memory import tensor_bytes
from stoker.engine.memory import UnitBytes, plan
from stoker.errors import RequestError
from stoker.sampling.settings import Sampling
from tests.conftest import FAMILIES
from tests.engine.drive import drain, engine_on
from tests.support.random_checkpoint import small_config, small_drafter_config, write_random_drafter

DEPTH = 5


def test_the_formulas(model: Decoder) -> None:
    """By hand, for a bf16 model with DeltaNet and attention layers and an MTP head."""
    config = model.config
    delta = config.delta
    assert delta is not None
    unit = unit_bytes(config, DEPTH, torch.bfloat16, DrafterBytes.mtp(config, torch.bfloat16))
    attention = config.layer_types.count("full_attention")
    linear = len(config.layer_types) - attention
    kv = 64 * 2 * config.num_kv_heads * config.head_dim * 2
    assert unit.page == (attention + 1) * kv
    recurrent = delta.value_heads * delta.key_dim * delta.value_dim * 4
    ring = ring_size(1 + DEPTH, delta.conv_kernel)
    token, rest = divmod(unit.slot - config.hidden_size * 2 - linear * recurrent, linear * ring)
    assert rest == 0
    # a token to replay: what went into the conv, and no more than q, k, v and the gates in fp32 of what came out
    assert 0 < token - delta.conv_channels * 2 <= 4 * (delta.conv_channels + 2 * delta.value_heads)
    assert unit.checkpoint == linear * (recurrent + (delta.conv_kernel - 1) * delta.conv_channels * 2)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        (family, kind)
        for family in FAMILIES
        for kind in ("none", "mtp", "dflash")
        if (family, kind) != ("qwen3_moe", "mtp")
    ],
)
def test_what_is_planned_is_what_is_allocated(
    checkpoints: dict[str, Path], tmp_path: Path, family: str, kind: str
) -> None:
    model = load_model(checkpoints[family]).model
    dtype = model.embed_tokens.weight.dtype
    own = DrafterBytes()
    if kind == "mtp":
        own = DrafterBytes.mtp(model.config, dtype)
    elif kind == "dflash":
        write_random_drafter(tmp_path, small_drafter_config(small_config(family)))
        network = load_drafter(tmp_path, model.config)
        own = DrafterBytes.dflash(network.config, dtype)
    unit = unit_bytes(model.config, DEPTH, dtype, own)
    budget = 3 << 20
    config = plan(unit, budget, context=500, slots=3, checkpoint_bytes=1 << 19, max_depth=DEPTH)
    drafter: CpuMtp | CpuDFlash | None = None
    if kind == "mtp":
        drafter = CpuMtp(model, config.pages, config.slots)
    elif kind == "dflash":
        drafter = CpuDFlash(model, network, config.pages)
    engine = engine_on(model, config, drafter)
    held = engine.stats().cache_bytes
    if isinstance(drafter, CpuMtp):
        held += tensor_bytes(drafter.pages) + drafter.last.nbytes
    elif drafter:
        held += tensor_bytes(drafter.pages)
    assert held == unit.total(config)
    assert budget - unit.page < held <= budget
    assert config.checkpoints * unit.checkpoint <= 1 << 19
    engine.submit([1] * 480, Sampling(max_tokens=20), DEPTH if drafter else 0)
    assert len(drain(engine)[0]) == 20


def test_fp8_keys_and_values_are_planned_with_their_scales(model: Decoder) -> None:
    unit = unit_bytes(model.config, DEPTH, torch.bfloat16, kv_dtype="fp8")
    wide = unit_bytes(model.config, DEPTH, torch.bfloat16)
    assert wide.page / 2 < unit.page < wide.page * 0.6
    assert (unit.slot, unit.checkpoint) == (wide.slot, wide.checkpoint)
    config = plan(unit, 1 << 20, context=500, slots=2, max_depth=DEPTH, kv_dtype="fp8")
    assert engine_on(model, config).stats().cache_bytes == unit.total(config)


def test_a_budget_that_is_too_small_is_refused_with_the_sum(model: Decoder) -> None:
    unit = UnitBytes(page=4096, slot=1 << 20, checkpoint=1 << 19)
    exact = 2 * unit.slot + 3 * unit.checkpoint + 16 * unit.page
    config = plan(unit, exact, context=1000, slots=2, checkpoint_bytes=(3 << 19) + 9, prefill_budget=128)
    assert (config.pages, config.slots, config.checkpoints, config.prefill_budget) == (16, 2, 3, 128)
    with pytest.raises(RequestError) as error:
        plan(unit, exact - 1, context=1000, slots=2, checkpoint_bytes=3 << 19)
    assert str(error.value) == (
        "3.6 MiB of cache are 1 bytes too few: 2 slots take 2.0 MiB, 3 checkpoints 1.5 MiB, and a context of 1,000 "
        "tokens needs 16 pages of 4.0 KiB: 3.6 MiB in all. "
        "Allow more, or ask for fewer slots, fewer checkpoint bytes or a shorter context."
    )
    with pytest.raises(RequestError, match="slots is 0, expected at least 1"):
        plan(unit, exact, context=1000, slots=0)
    with pytest.raises(RequestError, match="context is -5, expected at least 1"):
        plan(unit, exact, context=-5)
