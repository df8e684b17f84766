"""The embedded model: small enough, whole, in the formats it claims, and the same through transformers."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from stoker.backends.family import Family
from stoker.backends.network.load import load_model
from stoker.checkpoint.build import BuildOptions, build
from stoker.checkpoint.inspect.report import inspect
from stoker.demo import EMBEDDED, prompts
from stoker.engine.tokenizer import Tokenizer
from stoker.sampling.settings import Sampling
from stoker.weights.checkpoint import Checkpoint
from stoker.weights.reader import read_tensor
from tests.backends.network.forward import new_cache, row_errors, run_chunks
from tests.engine.drive import generate
from tests.support.extent import ALL

LIMIT = 24 << 20
KINDS = ("JSON", "agent", "code", "prose")
logging.set_verbosity_error()
logging.disable_progress_bar()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fp32 and bf16: dequantised exports for transformers."""
    root = tmp_path_factory.mktemp("exported")
    for dtype in ("fp32", "bf16"):
        build(BuildOptions(str(EMBEDDED), drafter=str(EMBEDDED / "drafter"), to=dtype), root / dtype)
    return root


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Prompts of all kinds in turn: 16, or 50."""
    tokenizer, count = Tokenizer(EMBEDDED), 50 if ALL else 16
    return [tokenizer.encode(text) for group in zip(*prompts().values(), strict=True) for text in group][:count]


@torch.inference_mode()
def reference_logits(directory: Path, texts: list[list[int]]) -> list[tuple[Tensor, int]]:
    """Of each text also how many rows come before any where rounding alone decides between two experts. On which one it
    falls depends on the processor and its threads; with another expert it is another row, and all after it see that."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    tied: list[Tensor] = []

    def note(_: nn.Module, __: object, output: tuple[Tensor, ...]) -> None:
        chosen = output[2].shape[-1]
        last, next_best = output[0].topk(chosen + 1, dim=-1).values[:, -2:].unbind(-1)
        tied.append(last - next_best < 5e-6)

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(note)
    found = []
    for text in texts:
        tied.clear()
        logits = model(torch.tensor([text])).logits[0]
        rows = torch.stack(tied).any(0).nonzero().flatten().tolist()
        found.append((logits, min(rows, default=len(text))))
    return found


def clear(logits: Tensor) -> Tensor:
    """Where the first choice leads by more than rounding can move it."""
    two = logits.topk(2, dim=-1).values
    return two[..., 0] - two[..., 1] > 1e-3


def test_it_is_whole_and_within_its_size() -> None:
    report = inspect(EMBEDDED, verify_bytes=True)
    assert not report.errors
    formats = {group.name: group.format for group in report.groups}
    assert formats["routed experts"] == "int4-g128"
    assert formats["shared experts"] == "fp8-b128"
    assert formats["head"] == "int8-row"
    assert formats["embedding"] == "bf16"
    assert (report.mtp.complete, report.mtp.sane) == (True, True)
    files = [file for file in EMBEDDED.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= LIMIT
    assert max(file.stat().st_size for file in files) <= 16 << 20


def test_int4_scales_are_exact_in_bf16() -> None:
    """Engines that keep scales in bf16 compute with the same numbers."""
    for directory in (EMBEDDED, EMBEDDED / "drafter"):
        checkpoint = Checkpoint.open(directory)
        scales = [info for name, info in checkpoint.tensors.items() if name.endswith(".scales")]
        assert scales
        for info in scales:
            values = read_tensor(info)
            assert torch.equal(values.to(torch.bfloat16).to(values.dtype), values), info.name


def test_an_export_is_what_vllm_and_transformers_expect(exported: Path) -> None:
    """Names as Qwen3.5 publishes them: experts fused in the trunk, one by one in the MTP head."""
    config = json.loads((exported / "bf16" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5MoeForCausalLM"]
    assert config["mtp_num_hidden_layers"] == 1
    assert "quantization_config" not in config
    tensors = Checkpoint.open(exported / "bf16").tensors
    layer = {
        "input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate.weight", "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj", "mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight",
        "mlp.shared_expert.down_proj.weight", "mlp.shared_expert_gate.weight",
    }  # fmt: skip
    delta = {f"linear_attn.{part}" for part in ("A_log", "dt_bias", "conv1d.weight", "norm.weight", "out_proj.weight")}
    delta |= {f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "a", "b")}
    attention = {f"self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    wanted = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for index in range(8):
        parts = layer | (attention if index % 4 == 3 else delta)
        wanted |= {f"model.layers.{index}.{part}" for part in parts}
    single = {f"mlp.experts.{e}.{part}_proj.weight" for e in range(16) for part in ("gate", "up", "down")}
    single |= {part for part in layer if "experts." not in part} | attention
    wanted |= {f"mtp.layers.0.{part}" for part in single}
    wanted |= {f"mtp.{part}.weight" for part in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    assert set(tensors) == wanted
    for name, info in tensors.items():
        assert info.dtype == ("F32" if name.endswith(("A_log", "linear_attn.norm.weight")) else "BF16"), name


def test_tokenizer_and_template_are_those_of_transformers(exported: Path) -> None:
    ours, theirs = Tokenizer(EMBEDDED), AutoTokenizer.from_pretrained(exported / "bf16")
    messages = [{"role": "user", "content": "Mennyi 17 + 25? Árvíztűrő tükörfúrógép."}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ours.encode_chat(messages) == theirs.encode(rendered, add_special_tokens=False)
    for kind in KINDS:
        text = prompts()[kind][0]
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_logits_and_greedy_tokens_are_those_of_transformers(exported: Path, texts: list[list[int]]) -> None:
    model = load_model(EMBEDDED, dtype=torch.float32).model
    sure = total = 0
    for text, (logits, length) in zip(texts, reference_logits(exported / "fp32", texts), strict=True):
        want, got = logits[:length], run_chunks(model, new_cache(model), text, [len(text)], Family.PREFILL)[:length]
        assert row_errors(got, want).max() <= 2e-5
        where = clear(want)
        sure, total = sure + int(where.sum()), total + length
        assert torch.equal(got.argmax(-1)[where], want.argmax(-1)[where])
    assert sure > 0.99 * total
    assert total > 0.9 * sum(map(len, texts))


def test_answers_are_those_transformers_gives(exported: Path, texts: list[list[int]]) -> None:
    """Token by token from Stoker's engine, judged position by position against the export's own next token."""
    model = load_model(EMBEDDED, dtype=torch.float32).model
    answers = [list(generate(model, text, Sampling(max_tokens=12))) for text in texts[::5]]
    whole = [text + answer for text, answer in zip(texts[::5], answers, strict=True)]
    judged = 0
    for answer, (logits, length) in zip(answers, reference_logits(exported / "fp32", whole), strict=True):
        begin = len(logits) - len(answer) - 1
        after = logits[begin : min(len(logits) - 1, length)]
        where = clear(after)
        judged += len(after)
        assert torch.equal(after.argmax(-1)[where], torch.tensor(answer[: len(after)])[where])
    assert judged > 0.8 * sum(map(len, answers))
