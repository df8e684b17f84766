"""Writes a random checkpoint at the shapes of Qwen3.5-122B-A10B as it is published: what a server loads from disk.

    PYTHONPATH=src:. python -m benchmarks.gpu.checkpoint /mnt/t/model [--layers 48] [--weights int4|hybrid]

INT4 is the layout of Intel's AutoRound release: experts, attention and DeltaNet in INT4 in groups of 128, shared
experts, head and MTP head in BF16. Hybrid is what `stoker build` makes of it: shared experts in FP8, head in INT8.
66.6 GiB with all layers, so a large tmpfs is the place for it. Values are made on the GPU. What a layer adds to the
stream is small, so that tokens differ and choose their experts independently. The tokenizer is the embedded model's,
its vocabulary filled up with words that no merge reaches.
"""

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu.weights import CODE_RMS, QWEN_122B, SHIFT
from stoker.backends.gpu.packed import Kind
from stoker.demo import EMBEDDED
from stoker.weights.model_config import FULL, ModelConfig

GROUP = 128
WRITERS = 6
TRUNK = "model.language_model."
Tensors = dict[str, Tensor]


class Maker:
    """Tensors of one file, by their published names."""

    def __init__(self, config: ModelConfig, device: torch.device, hybrid: bool) -> None:
        assert config.moe is not None
        assert config.delta is not None
        self.config, self.moe, self.delta, self.device, self.hybrid = config, config.moe, config.delta, device, hybrid
        self.made: Tensors = {}

    def take(self) -> Tensors:
        made, self.made = self.made, {}
        return made

    def plain(self, name: str, *shape: int, gain: float = 1.0) -> None:
        values = torch.randn(shape, device=self.device) * gain * shape[-1] ** -0.5
        self.made[f"{name}.weight"] = values.bfloat16()

    def int4(self, name: str, out: int, inputs: int, gain: float = 1.0) -> None:
        def codes(*shape: int) -> Tensor:
            return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, device=self.device).int()

        groups = inputs // GROUP
        signs = torch.randint(0, 2, (groups, out), device=self.device) * 2 - 1
        self.made[f"{name}.qweight"] = codes(inputs // 8, out)
        self.made[f"{name}.qzeros"] = torch.full((groups, out // 8), 0x77777777, dtype=torch.int32, device=self.device)
        self.made[f"{name}.scales"] = (signs * gain * inputs**-0.5 / CODE_RMS[Kind.INT4]).half()

    def fp8(self, name: str, out: int, inputs: int, gain: float = 1.0) -> None:
        values = torch.randn(out, inputs, device=self.device) * 100.0
        self.made[f"{name}.weight"] = values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        scale = torch.full((-(-out // GROUP), -(-inputs // GROUP)), gain * inputs**-0.5 / 100.0, device=self.device)
        self.made[f"{name}.weight_scale_inv"] = scale

    def norms(self, *names: str) -> None:
        for name in names:
            self.made[f"{name}.weight"] = torch.zeros(self.config.hidden_size, device=self.device).bfloat16()

    def attention(self, prefix: str, quantised: bool) -> None:
        hidden, dim = self.config.hidden_size, self.config.head_dim
        heads, keys = self.config.num_heads * dim, self.config.num_kv_heads * dim
        matrix = self.int4 if quantised else self.plain
        matrix(f"{prefix}.q_proj", 2 * heads, hidden)
        matrix(f"{prefix}.k_proj", keys, hidden)
        matrix(f"{prefix}.v_proj", keys, hidden)
        matrix(f"{prefix}.o_proj", hidden, heads, gain=SHIFT)
        for name in ("q_norm", "k_norm"):
            self.made[f"{prefix}.{name}.weight"] = torch.zeros(dim, device=self.device).bfloat16()

    def deltanet(self, prefix: str) -> None:
        hidden, delta = self.config.hidden_size, self.delta
        heads, values = delta.value_heads, delta.value_heads * delta.value_dim
        self.int4(f"{prefix}.in_proj_qkv", delta.conv_channels, hidden)
        self.int4(f"{prefix}.in_proj_z", values, hidden)
        self.int4(f"{prefix}.in_proj_a", heads, hidden)
        self.int4(f"{prefix}.in_proj_b", heads, hidden)
        self.int4(f"{prefix}.out_proj", hidden, values, gain=SHIFT)
        conv = torch.randn(delta.conv_channels, 1, delta.conv_kernel, device=self.device) * 0.5
        self.made[f"{prefix}.conv1d.weight"] = conv.bfloat16()
        self.made[f"{prefix}.A_log"] = torch.log(torch.rand(heads, device=self.device) * 15.0 + 0.01)
        self.made[f"{prefix}.dt_bias"] = (torch.randn(heads, device=self.device) - 4.0).bfloat16()
        self.made[f"{prefix}.norm.weight"] = torch.ones(delta.value_dim, device=self.device)

    def experts(self, prefix: str, quantised: bool) -> None:
        hidden, inner = self.config.hidden_size, self.moe.intermediate_size
        matrix = self.int4 if quantised else self.plain
        for expert in range(self.moe.num_experts):
            matrix(f"{prefix}.experts.{expert}.gate_proj", inner, hidden)
            matrix(f"{prefix}.experts.{expert}.up_proj", inner, hidden)
            matrix(f"{prefix}.experts.{expert}.down_proj", hidden, inner, gain=SHIFT)
        self.plain(f"{prefix}.gate", self.moe.num_experts, hidden, gain=3.0)
        self.plain(f"{prefix}.shared_expert_gate", 1, hidden)
        shared, inner = f"{prefix}.shared_expert", self.moe.shared_intermediate_size
        matrix = self.fp8 if self.hybrid and quantised else self.plain
        matrix(f"{shared}.gate_proj", inner, hidden)
        matrix(f"{shared}.up_proj", inner, hidden)
        matrix(f"{shared}.down_proj", hidden, inner, gain=SHIFT)

    def layer(self, number: int) -> Tensors:
        prefix = f"{TRUNK}layers.{number}"
        self.norms(f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm")
        if self.config.layer_types[number] == FULL:
            self.attention(f"{prefix}.self_attn", quantised=True)
        else:
            self.deltanet(f"{prefix}.linear_attn")
        self.experts(f"{prefix}.mlp", quantised=True)
        return self.take()

    def ends(self) -> Tensors:
        vocab, hidden = self.config.vocab_size, self.config.hidden_size
        self.made[f"{TRUNK}embed_tokens.weight"] = torch.randn(vocab, hidden, device=self.device).bfloat16()
        self.norms(f"{TRUNK}norm")
        if self.hybrid:
            codes = torch.randint(-127, 128, (vocab, hidden), dtype=torch.int8, device=self.device)
            self.made["lm_head.weight"] = codes
            scale = hidden**-0.5 / CODE_RMS[Kind.INT8]
            self.made["lm_head.weight_scale"] = torch.full((vocab, 1), scale, device=self.device)
        else:
            self.plain("lm_head", vocab, hidden)
        return self.take()

    def mtp(self) -> Tensors:
        hidden = self.config.hidden_size
        prefix = "mtp.layers.0"
        self.norms(f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm")
        self.norms("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
        self.plain("mtp.fc", hidden, 2 * hidden)
        self.attention(f"{prefix}.self_attn", quantised=False)
        self.experts(f"{prefix}.mlp", quantised=False)
        return self.take()

    def files(self) -> Iterator[tuple[str, Tensors]]:
        layers = len(self.config.layer_types)
        count = layers + 1
        for number in range(layers):
            yield f"model-{number + 1:05}-of-{count:05}.safetensors", self.layer(number)
        yield f"model-{count:05}-of-{count:05}.safetensors", self.ends()
        yield "model_extra_tensors.safetensors", self.mtp()


def config_json(config: ModelConfig, hybrid: bool) -> dict[str, Any]:
    """As published, but for what only pictures need."""
    moe, delta = config.moe, config.delta
    assert moe is not None
    assert delta is not None
    text = {
        "model_type": "qwen3_5_moe_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "layer_types": list(config.layer_types),
        "linear_conv_kernel_dim": delta.conv_kernel,
        "linear_key_head_dim": delta.key_dim,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_value_head_dim": delta.value_dim,
        "max_position_embeddings": config.max_positions,
        "moe_intermediate_size": moe.intermediate_size,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": config.num_heads,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "num_hidden_layers": len(config.layer_types),
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": config.rotary_dim / config.head_dim,
            "rope_theta": config.rope_theta,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": moe.shared_intermediate_size,
        "vocab_size": config.vocab_size,
    }
    plain = {"bits": 16, "data_type": "float"}
    kept: dict[str, Any] = {}
    for number in range(len(config.layer_types)):
        prefix = f"{TRUNK}layers.{number}.mlp.shared_expert"
        for name in ("_gate", ".gate_proj", ".up_proj", ".down_proj"):
            kept[prefix + name] = plain
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "auto-round",
            "data_type": "int",
            "bits": 4,
            "group_size": GROUP,
            "sym": True,
            "packing_format": "auto_round:auto_gptq",
            "block_name_to_quantize": f"{TRUNK}layers",
            "extra_config": kept,
        },
    }


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    found = json.loads((EMBEDDED / "tokenizer.json").read_text())
    vocab = found["model"]["vocab"]
    used = {*vocab.values(), *(token["id"] for token in found.get("added_tokens", []))}
    vocab |= {f"w{number}x": number for number in range(vocab_size) if number not in used}
    (directory / "tokenizer.json").write_text(json.dumps(found))
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (EMBEDDED / name).exists():
            (directory / name).write_text((EMBEDDED / name).read_text())


def write(directory: Path, config: ModelConfig, device: torch.device, hybrid: bool) -> int:
    """Returns the bytes of all tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    total = 0
    pending: list[Future[None]] = []
    with ThreadPoolExecutor(WRITERS) as pool:
        for file, tensors in Maker(config, device, hybrid).files():
            while len(pending) >= WRITERS:  # the host's memory holds only so many files
                pending.pop(0).result()
            host = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
            total += sum(tensor.numel() * tensor.element_size() for tensor in host.values())
            index |= dict.fromkeys(host, file)
            pending.append(pool.submit(save_file, host, directory / file, {"format": "pt"}))
        for each in pending:
            each.result()
    (directory / "config.json").write_text(json.dumps(config_json(config, hybrid), indent=1))
    header = {"metadata": {"total_size": total}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(header))
    write_tokenizer(directory, config.vocab_size)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=len(QWEN_122B.layer_types))
    parser.add_argument("--weights", default="int4", choices=["int4", "hybrid"])
    options = parser.parse_args()
    started = time.perf_counter()
    torch.manual_seed(0)
    from benchmarks.gpu.decode import shortened

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    total = write(options.directory, shortened(QWEN_122B, options.layers), device, options.weights == "hybrid")
    print(f"{total / 2**30:.1f} GiB in {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
