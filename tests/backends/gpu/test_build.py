"""From a loaded model to an engine on the GPU's runner: what is handed over, and what is refused."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from stoker.backends.gpu import build, reference
from stoker.backends.gpu.build import gpu_backend
from stoker.backends.network.count import step_bytes
from stoker.backends.network.decoder import Decoder
from stoker.engine.config import EngineConfig
from stoker.engine.engine import Engine
from stoker.errors import CheckpointError, ConfigError, RequestError
from stoker.sampling.settings import Sampling
from stoker.speculate.choice import DraftChoice
from stoker.weights.model_config import ModelConfig
from tests.backends.gpu.test_step import model, quantize
from tests.engine.drive import drain
from tests.support.random_checkpoint import small_config

CONFIG = EngineConfig(pages=8, slots=2, max_depth=2, prefill_budget=64)


def test_a_model_is_handed_over_layer_by_layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An answer that repeats its prompt, with lookup; weights of four formats."""
    reference.install(monkeypatch.setattr)
    decoder = model()
    quantize(decoder)
    bytes_before = step_bytes(decoder)
    backend, drafter = gpu_backend(decoder, CONFIG, DraftChoice.parse("lookup:2"), tmp_path)
    kept = {name for name, parameter in decoder.named_parameters() if not parameter.is_meta}
    assert kept == {"embed_tokens.weight", "norm.weight"}
    assert step_bytes(decoder) == bytes_before
    engine = Engine(CONFIG, backend, drafter)
    bias = dict.fromkeys((3, 4), 100.0)
    engine.submit([3, 4, 3, 4, 3], Sampling(max_tokens=8, logit_bias=bias), depth=2)
    assert set(drain(engine)[0]) <= {3, 4}
    assert engine.stats().totals.drafted > 0


def test_what_the_gpu_does_not_do_is_refused_with_a_way_out(tmp_path: Path) -> None:
    dense = Decoder(ModelConfig.from_dict(small_config("qwen3_5_text"), where="test"), mtp=False)
    with pytest.raises(ConfigError, match=r"this model has dense layers\."):
        gpu_backend(dense, CONFIG, DraftChoice.parse("none"), tmp_path)
    with torch.device("meta"):
        sparse = Decoder(model().config, mtp=False)
    with pytest.raises(RequestError, match="vocab=32: on the GPU drafts are made from the whole head"):
        gpu_backend(sparse, CONFIG, DraftChoice.parse("mtp:2,vocab=32"), tmp_path)
    with pytest.raises(CheckpointError, match="has no MTP head"):
        gpu_backend(sparse, CONFIG, DraftChoice.parse("mtp:2"), tmp_path)
    with pytest.raises(RequestError, match="the GPU stores them as bf16 or fp8"):
        gpu_backend(sparse, EngineConfig(kv_dtype="fp32"), DraftChoice.parse("none"), tmp_path)


def test_what_the_references_do_not_do_is_refused_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "REFERENCES_ONLY", True)
    none = DraftChoice.parse("none")
    with torch.device("meta"):
        hybrid = Decoder(model().config, mtp=False)
        attention = Decoder(ModelConfig.from_dict(small_config("qwen3_moe"), where="test"), mtp=False)
    with pytest.raises(RequestError, match=r"as bf16, not fp8\. Leave STOKER_OPS out, or store them as bf16\."):
        gpu_backend(hybrid, EngineConfig(kv_dtype="fp8"), none, tmp_path)
    with pytest.raises(ConfigError, match=r"this model's 4 layers none is one\. Leave STOKER_OPS out"):
        gpu_backend(attention, CONFIG, none, tmp_path)
