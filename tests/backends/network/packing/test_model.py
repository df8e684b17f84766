"""A packed model computes what its checkpoint says, and goes on doing so when weights are replaced."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from stoker.backends.family import Family
from stoker.backends.network import attention
from stoker.backends.network import load as loading
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.experts import Experts
from stoker.backends.network.linear import DenseMlp, Fused
from stoker.backends.network.load import load_model, prepare
from tests.backends.network.forward import new_cache, row_errors, run_chunks
from tests.conftest import FAMILIES
from tests.support.situations import intel_int4, qwen_fp8

TOKENS = torch.randint(0, 512, (120,), generator=torch.Generator().manual_seed(5)).tolist()


def logits(model: Decoder, kind: Family) -> Tensor:
    chunks = [120] if kind is Family.PREFILL else [1] * 20 + [16] * 6 + [4]
    return run_chunks(model, new_cache(model), TOKENS, chunks, kind)


def fused_parts(model: Decoder) -> list[Fused]:
    return [value for part in model.modules() for value in vars(part).values() if isinstance(value, Fused)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_projection_of_a_bf16_model_is_packed_at_load(checkpoints: dict[str, Path], family: str) -> None:
    model = load_model(checkpoints[family]).model
    assert fused_parts(model)
    assert all(fused.packed is not None for fused in fused_parts(model))
    for part in model.modules():
        if isinstance(part, Experts):
            assert part.packed is not None
    exact = load_model(checkpoints[family], dtype=torch.float32).model
    assert all(fused.packed is None for fused in fused_parts(exact))


def test_references_compute_everything_on_demand(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """`STOKER_OPS=reference`, for debugging a kernel."""
    packed = load_model(checkpoints["qwen3_5_moe_text"]).model
    monkeypatch.setattr(loading, "REFERENCES_ONLY", True)
    monkeypatch.setattr(attention, "REFERENCES_ONLY", True)
    monkeypatch.setattr(attention, "fused_attention", None)
    plain = load_model(checkpoints["qwen3_5_moe_text"]).model
    assert all(fused.packed is None for fused in fused_parts(plain))
    assert row_errors(logits(packed, Family.STEP), logits(plain, Family.STEP)).median() <= 0.05


@pytest.mark.parametrize("kind", list(Family))
@pytest.mark.parametrize("write", [intel_int4, qwen_fp8])
def test_logits_are_near_those_of_the_fp32_reference(tmp_path: Path, write, kind: Family) -> None:
    """The same weights in fp32; what is left is activations in bf16, and here and there an expert chosen otherwise."""
    write(tmp_path)
    want = logits(load_model(tmp_path, dtype=torch.float32).model, kind)
    errors = row_errors(logits(load_model(tmp_path).model, kind), want)
    assert errors.median() <= 0.05
    assert errors.max() <= 0.6


def test_a_step_is_told_of_progress_in_bytes(checkpoints: dict[str, Path]) -> None:
    seen: list[tuple[int, int]] = []
    load_model(checkpoints[FAMILIES[0]], progress=lambda done, total: seen.append((done, total)))
    done, total = seen[-1]
    assert done == total > 0


def test_replaced_weights_are_used_at_once_and_packed_anew_on_demand(checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints["qwen3_5_text"]).model
    before = logits(model, Family.STEP)
    mlp = next(part for part in model.modules() if isinstance(part, DenseMlp))
    old = mlp.up_proj.weight
    assert isinstance(old, Tensor)
    del mlp.up_proj.weight
    mlp.up_proj.weight = torch.zeros_like(old)
    assert mlp.inputs.packed is None
    changed = logits(model, Family.STEP)
    assert not torch.equal(changed, before)
    prepare(model)
    assert mlp.inputs.packed is not None
    assert row_errors(logits(model, Family.STEP), changed).median() <= 0.02
