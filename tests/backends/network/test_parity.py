"""Stoker computes what transformers computes, on random checkpoints of all three families."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from stoker.backends.family import Family
from stoker.backends.network.load import load_model
from tests.backends.network.forward import new_cache, relative, row_errors, run_chunks, state_of
from tests.conftest import FAMILIES
from tests.support.random_checkpoint import small_config, write_random_checkpoint

LENGTH = 150
logging.set_verbosity_error()
logging.disable_progress_bar()


def reference(directory: Path, dtype: torch.dtype = torch.float32):
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


def prompt(seed: int = 0, vocab: int = 512) -> list[int]:
    return torch.randint(0, vocab, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_logits_match_at_every_position(checkpoints: dict[str, Path], family: str) -> None:
    model = load_model(checkpoints[family], dtype=torch.float32).model
    with torch.inference_mode():
        want = reference(checkpoints[family])(torch.tensor([prompt()])).logits[0]
    got = run_chunks(model, new_cache(model), prompt(), [LENGTH], Family.PREFILL)
    assert row_errors(got, want).max() <= 2e-5
    assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_token_by_token_logits_match_transformers_decode(checkpoints: dict[str, Path], family: str) -> None:
    model = load_model(checkpoints[family], dtype=torch.float32).model
    theirs = reference(checkpoints[family])
    past = DynamicCache(config=theirs.config)
    rows = []
    with torch.inference_mode():
        for token in prompt():
            rows.append(theirs(torch.tensor([[token]]), past_key_values=past, use_cache=True).logits[0])
    got = run_chunks(model, new_cache(model), prompt(), [1] * LENGTH, Family.STEP)
    assert row_errors(got, torch.cat(rows)).max() <= 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_ends_in_the_state_of_token_by_token(checkpoints: dict[str, Path], family: str) -> None:
    model = load_model(checkpoints[family], dtype=torch.float32).model
    states = {}
    for kind in Family:
        cache = new_cache(model)
        run_chunks(model, cache, prompt(), [LENGTH] if kind is Family.PREFILL else [1] * LENGTH, kind)
        states[kind] = state_of(cache, 0, range(16), LENGTH)
    for chunked, recurrent in zip(states[Family.PREFILL], states[Family.STEP], strict=True):
        assert relative(chunked, recurrent) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", list(Family))
def test_bf16_is_as_close_to_fp32_as_transformers(tmp_path: Path, family: str, kind: Family) -> None:
    """Routing flips make single prompts noisy, so distances are pooled over checkpoints and prompts."""
    own: list[Tensor] = []
    theirs: list[Tensor] = []
    for seed in range(3):
        write_random_checkpoint(tmp_path / str(seed), small_config(family), seed=seed)
        truth, rounded = (reference(tmp_path / str(seed), dtype) for dtype in (torch.float32, torch.bfloat16))
        model = load_model(tmp_path / str(seed)).model
        for text in range(3):
            tokens = prompt(10 * seed + text)
            with torch.inference_mode():
                want = truth(torch.tensor([tokens])).logits[0]
                theirs.append(row_errors(rounded(torch.tensor([tokens])).logits[0].float(), want))
            own.append(row_errors(run_chunks(model, new_cache(model), tokens, [LENGTH], kind), want))
    ours, other = torch.cat(own), torch.cat(theirs)
    assert ours.square().mean().sqrt() <= 1.1 * other.square().mean().sqrt()
    assert ours.median() <= 1.1 * other.median()


def test_multimodal_layout_gives_the_same_model(tmp_path: Path) -> None:
    """The published file nests the text model and adds vision; transformers' own class writes ours here."""
    from safetensors.torch import load_file, save_file

    text = small_config("qwen3_5_moe_text")
    write_random_checkpoint(tmp_path / "text", text, shards=1)
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 128}
    whole = {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": False,
    }
    write_random_checkpoint(tmp_path / "whole", whole, prefix="model.language_model.", shards=1)
    file = next((tmp_path / "whole").glob("model-*.safetensors"))
    tensors = load_file(file)
    tensors["model.visual.patch_embed.proj.bias"] = torch.zeros(32)
    tensors["model.visual.merger.norm.bias"] = torch.zeros(32)
    save_file(tensors, file)
    plain = load_model(tmp_path / "text", dtype=torch.float32)
    nested = load_model(tmp_path / "whole", dtype=torch.float32)
    assert [note for note in nested.notes if "vision" in note] == [
        "2 vision tensors not used: Stoker computes text only."
    ]
    tokens = prompt()
    got, want = (run_chunks(m, new_cache(m), tokens, [LENGTH], Family.PREFILL) for m in (nested.model, plain.model))
    assert torch.equal(got, want)
