"""The hybrid through Stoker computes what its dequantised export computes through transformers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from stoker.backends.family import Family
from stoker.backends.network.load import load_model
from stoker.checkpoint.build import BuildOptions, build
from stoker.checkpoint.inspect.report import inspect
from stoker.sampling.settings import Sampling
from tests.backends.network.forward import new_cache, row_errors, run_chunks
from tests.engine.drive import generate
from tests.support import situations

PROMPTS, LENGTH, ANSWER = 50, 48, 12
logging.set_verbosity_error()
logging.disable_progress_bar()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hybrid: INT4 base, FP8 shared experts of another release, INT8 head, MTP; fp32 and bf16: its exports."""
    root = tmp_path_factory.mktemp("built")
    situations.int4_index_without_mtp(root / "int4", vision=False)
    situations.qwen_fp8(root / "fp8", vision=False)
    hybrid = BuildOptions(str(root / "int4"), shared_experts=str(root / "fp8"), lm_head="int8")
    build(hybrid, root / "hybrid")
    for dtype in ("fp32", "bf16"):
        build(BuildOptions(str(root / "hybrid"), to=dtype), root / dtype)
    return root


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 512, (LENGTH,), generator=generator).tolist() for _ in range(PROMPTS)]


@torch.inference_mode()
def reference_logits(directory: Path, texts: list[list[int]], dtype: torch.dtype = torch.float32) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
    return torch.stack([model(torch.tensor([text])).logits[0].float() for text in texts])


def test_the_hybrid_is_what_it_says(built: Path) -> None:
    report = inspect(built / "hybrid")
    assert not report.errors
    formats = {group.name: group.format for group in report.groups}
    assert (formats["routed experts"], formats["shared experts"], formats["head"]) == (
        "int4-g32",
        "fp8-b128",
        "int8-row",
    )
    assert (report.mtp.present, report.mtp.complete, report.mtp.sane) == (True, True, True)


def test_teacher_forced_logits_and_greedy_tokens_agree_on_50_prompts(built: Path) -> None:
    hybrid = load_model(built / "hybrid", dtype=torch.float32).model
    texts = prompts()
    want = reference_logits(built / "fp32", texts)
    got = torch.stack([run_chunks(hybrid, new_cache(hybrid), text, [LENGTH], Family.PREFILL) for text in texts])
    assert row_errors(got, want).max() <= 2e-5
    two = want.topk(2, dim=-1).values
    clear = (two[..., 0] - two[..., 1]) > 1e-3
    assert clear.float().mean() > 0.99
    assert torch.equal(got.argmax(-1)[clear], want.argmax(-1)[clear])


def test_greedy_answers_are_those_transformers_gives(built: Path) -> None:
    """Token by token from Stoker's engine, judged position by position against the export's own next token."""
    hybrid = load_model(built / "hybrid", dtype=torch.float32).model
    texts = prompts()
    answers = [list(generate(hybrid, text, Sampling(max_tokens=ANSWER))) for text in texts]
    logits = reference_logits(built / "fp32", [text + answer for text, answer in zip(texts, answers, strict=True)])
    logits = logits[:, LENGTH - 1 : -1]  # what comes after each position of the answer's run
    two = logits.topk(2, dim=-1).values
    clear = (two[..., 0] - two[..., 1]) > 1e-3
    assert torch.equal(logits.argmax(-1)[clear], torch.tensor(answers)[clear])


def test_the_bf16_export_agrees_nearly_everywhere(built: Path) -> None:
    """Rounding INT4 products to bf16 changes most values a little: the rate is reported, and is no less than this."""
    hybrid = load_model(built / "hybrid").model
    texts = prompts()[:10]
    want = reference_logits(built / "bf16", texts, torch.bfloat16)
    got = torch.stack([run_chunks(hybrid, new_cache(hybrid), text, [LENGTH], Family.PREFILL) for text in texts])
    agreement = float((got.argmax(-1) == want.argmax(-1)).float().mean())
    print(f"greedy tokens of the hybrid and of its bf16 export agree at {agreement:.1%} of {want[..., 0].numel()}")
    assert agreement > 0.8
