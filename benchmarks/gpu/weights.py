"""Random networks at real shapes, made on the device in operand order: what GPU benchmarks run without a checkpoint.

The stream stays close to the embedding of its token, so that tokens differ and their routing is independent, as random
numbers should have it; a random network that mixes more makes all tokens alike, and they then share their experts.
"""

from dataclasses import replace

import torch
from torch import Tensor

from stoker.backends.gpu.dflash import DFlashLayerWeights, DFlashWeights
from stoker.backends.gpu.kernels.attention import AttentionWeights
from stoker.backends.gpu.kernels.deltanet import DeltaWeights
from stoker.backends.gpu.kernels.drafter import ContextWeights
from stoker.backends.gpu.kernels.rows import MtpNorms
from stoker.backends.gpu.packed import Kind, PackedWeight, pack_bf16
from stoker.backends.gpu.weights import AttentionLayer, DeltaLayer, LayerWeights, MoeLayer, MtpWeights, StepWeights
from stoker.backends.network.attention import rope_table
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import FULL, LINEAR, SLIDING, DeltaConfig, ModelConfig, MoeConfig

# root mean square of random codes, by which scales are chosen
CODE_RMS = {Kind.INT4: 4.6, Kind.FP8: 70.0, Kind.INT8: 74.0, Kind.NVFP4: 2.9}
SHIFT = 0.03  # how much one layer adds to the stream, in proportion

QWEN_122B = ModelConfig(
    family="qwen3_5_moe", hidden_size=3072, layer_types=((LINEAR,) * 3 + (FULL,)) * 12, sparse_layers=(True,) * 48,
    num_heads=32, num_kv_heads=2, head_dim=256, rotary_dim=64, rope_theta=1e7, rms_norm_eps=1e-6,
    vocab_size=248320, max_positions=262144, tie_word_embeddings=False, attention_gate=True, norm_offset=True,
    intermediate_size=0, moe=MoeConfig(256, 8, 1024, 1024, True), delta=DeltaConfig(16, 64, 128, 128, 4),
    mtp_layers=1, dtype="bfloat16", eos_token_ids=(),
)  # fmt: skip
QWEN_35B = replace(
    QWEN_122B, hidden_size=2048, layer_types=((LINEAR,) * 3 + (FULL,)) * 10, sparse_layers=(True,) * 40, num_heads=16,
    moe=MoeConfig(256, 8, 512, 512, True), delta=DeltaConfig(16, 32, 128, 128, 4),
)  # fmt: skip
TINY = replace(
    QWEN_122B, hidden_size=128, layer_types=(LINEAR, FULL), sparse_layers=(True,) * 2, num_heads=4, head_dim=32,
    rotary_dim=8, vocab_size=256, max_positions=2048, moe=MoeConfig(16, 2, 128, 128, True),
    delta=DeltaConfig(1, 2, 64, 64, 4),
)  # fmt: skip
SHAPES = {"qwen3.5-122b-a10b": QWEN_122B, "qwen3.5-35b-a3b": QWEN_35B, "tiny": TINY}

# heads and intermediate size of the 35B's drafter are not published: in proportion to the 122B's
DFLASH_122B = DFlashConfig(
    hidden_size=3072, layer_types=(SLIDING,) * 5 + (FULL,), num_heads=32, num_kv_heads=8, head_dim=128,
    intermediate_size=9216, rms_norm_eps=1e-6, rope_theta=1e7, vocab_size=248320, sliding_window=4096, block_size=16,
    mask_token_id=248077, taps=(1, 7, 14, 20, 26, 32, 39, 45), causal=None,
)  # fmt: skip
DRAFTERS = {
    "qwen3.5-122b-a10b": DFLASH_122B,
    "qwen3.5-35b-a3b": replace(
        DFLASH_122B, hidden_size=2048, intermediate_size=6144, taps=(1, 6, 11, 16, 22, 27, 32, 37)
    ),
    "tiny": replace(
        DFLASH_122B, hidden_size=128, layer_types=(SLIDING, FULL), num_heads=4, num_kv_heads=2, head_dim=32,
        intermediate_size=256, vocab_size=256, sliding_window=64, mask_token_id=255, taps=(0, 1),
    ),
}  # fmt: skip


class Formats:
    """Which part of the network has which format, and how much a layer adds to the stream."""

    def __init__(self, name: str, shift: float) -> None:
        kinds = {
            "int4": (Kind.INT4, Kind.INT4, Kind.INT4, Kind.BF16, Kind.BF16),
            "hybrid": (Kind.INT4, Kind.INT4, Kind.INT4, Kind.FP8, Kind.INT8),
            # published NVFP4 checkpoints leave DeltaNet and the head in 16 bit
            "nvfp4": (Kind.NVFP4, Kind.NVFP4, Kind.BF16, Kind.NVFP4, Kind.BF16),
        }
        if name not in kinds:
            raise SystemExit(f"--weights must be one of {', '.join(kinds)}, not {name}.")
        self.experts, self.attention, self.delta, self.shared, self.head = kinds[name]
        self.shift = shift


def random_weight(kind: Kind, shape: tuple[int, ...], device: torch.device | str, gain: float = 1.0) -> PackedWeight:
    """[.., out, in] whose product with numbers near 1 is near `gain`."""
    *lead, out, inputs = shape
    rows = out + -out % 32
    units, groups = rows // 16, inputs // 128
    size = gain * inputs**-0.5
    if kind is Kind.BF16:
        return pack_bf16((torch.randn(shape, device=device) * size).bfloat16())
    packed = torch.randint(
        -(2**15), 2**15, (*lead, units, groups, kind.tiles, 16, 32), dtype=torch.int16, device=device
    )
    step = size / CODE_RMS[kind]
    if kind is Kind.INT4:
        signs = torch.randint(0, 2, (*lead, groups, rows), device=device, dtype=torch.int8) * 2 - 1
        scales = (signs * step).half()
        scales[..., out:] = 0
        return PackedWeight(kind, packed, scales, scales, out)
    if kind is Kind.FP8:
        packed &= -0x0809  # 0xF7F7: no code of these is NaN
        scales = torch.full((*lead, groups, units), step, device=device)
        return PackedWeight(kind, packed, scales, scales, out)
    row_scales = torch.full((*lead, rows), step, device=device)
    if kind is Kind.INT8:
        return PackedWeight(kind, packed, row_scales, row_scales, out)
    ones = torch.full((*lead, units, groups, 64), 0x38383838, dtype=torch.int32, device=device)  # E4M3's 1.0
    return PackedWeight(kind, packed, ones, row_scales, out)


def random_model(
    config: ModelConfig, weights: str, device: torch.device | str, positions: int, shift: float = SHIFT
) -> StepWeights:
    formats = Formats(weights, shift)
    rope = rope_table(torch.arange(positions, device=device), config.rope_theta, config.rotary_dim)
    layers = [_layer(config, kind, formats, rope, device) for kind in config.layer_types]
    hidden, eps = config.hidden_size, config.rms_norm_eps
    one = torch.ones(hidden, device=device)
    norms = MtpNorms(one, one, one, eps)
    mtp = MtpWeights(
        first=norms,
        again=norms,
        fc=random_weight(Kind.BF16, (hidden, 2 * hidden), device),
        layer=_layer(config, FULL, formats, rope, device),
        norm=one,
    )
    embedding = torch.randn(config.vocab_size, hidden, device=device).bfloat16()
    return StepWeights(embedding, layers, one, random_weight(formats.head, (config.vocab_size, hidden), device), mtp)


def random_drafter(config: DFlashConfig, weights: str, device: torch.device | str, positions: int) -> DFlashWeights:
    """A DFlash network; its projections are INT4 in an INT4 model, else BF16."""
    kind = Kind.INT4 if weights in ("int4", "hybrid") else Kind.BF16
    hidden, inter, dim = config.hidden_size, config.intermediate_size, config.head_dim
    rope = rope_table(torch.arange(positions, device=device), config.rope_theta, dim)
    one, head = torch.ones(hidden, device=device), torch.ones(dim, device=device)
    queries, keys, count = config.num_heads * dim, config.num_kv_heads * dim, len(config.layer_types)

    def layer() -> DFlashLayerWeights:
        return DFlashLayerWeights(
            one,
            random_weight(kind, (queries + 2 * keys, hidden), device),
            AttentionWeights(head, head, *rope, config.rms_norm_eps),
            random_weight(kind, (hidden, queries), device, SHIFT),
            one,
            random_weight(kind, (2 * inter, hidden), device),
            random_weight(kind, (hidden, inter), device, SHIFT),
        )

    return DFlashWeights(
        fc=random_weight(kind, (hidden, len(config.taps) * hidden), device),
        hidden_norm=one,
        memories=random_weight(kind, (2 * keys * count, hidden), device),
        context=ContextWeights(head.expand(count, -1).contiguous(), *rope, config.rms_norm_eps),
        layers=[layer() for _ in config.layer_types],
        norm=one,
    )


def _layer(
    config: ModelConfig, kind: str, formats: Formats, rope: tuple[Tensor, Tensor], device: torch.device | str
) -> LayerWeights:
    hidden = config.hidden_size
    one = torch.ones(hidden, device=device)
    mixer = _attention(config, formats, rope, device) if kind == FULL else _delta(config, formats, device)
    return LayerWeights(one, mixer, one, _moe(config, formats, device))


def _attention(
    config: ModelConfig, formats: Formats, rope: tuple[Tensor, Tensor], device: torch.device | str
) -> AttentionLayer:
    dim, hidden = config.head_dim, config.hidden_size
    rows = (2 * config.num_heads + 2 * config.num_kv_heads) * dim
    norm = torch.ones(dim, device=device)
    return AttentionLayer(
        random_weight(formats.attention, (rows, hidden), device),
        AttentionWeights(norm, norm, *rope, config.rms_norm_eps),
        random_weight(formats.attention, (hidden, config.num_heads * dim), device, formats.shift),
    )


def _delta(config: ModelConfig, formats: Formats, device: torch.device | str) -> DeltaLayer:
    delta = config.delta
    assert delta is not None
    heads = delta.value_heads
    values = heads * delta.value_dim
    rows = delta.conv_channels + values + 2 * heads
    return DeltaLayer(
        random_weight(formats.delta, (rows, config.hidden_size), device),
        DeltaWeights(
            conv=torch.randn(delta.conv_kernel, delta.conv_channels, device=device) * 0.5,
            decay=-torch.rand(heads, device=device) * 15.0 - 0.01,
            bias=torch.randn(heads, device=device) - 4.0,
            norm=torch.ones(delta.value_dim, device=device),
            eps=config.rms_norm_eps,
        ),
        random_weight(formats.delta, (config.hidden_size, values), device, formats.shift),
    )


def _moe(config: ModelConfig, formats: Formats, device: torch.device | str) -> MoeLayer:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    inter, count = moe.intermediate_size, moe.num_experts
    return MoeLayer(
        random_weight(Kind.BF16, (count + 1, hidden), device),
        random_weight(formats.experts, (count, 2 * inter, hidden), device),
        random_weight(formats.experts, (count, hidden, inter), device, formats.shift),
        random_weight(formats.shared, (2 * inter, hidden), device),
        random_weight(formats.shared, (hidden, inter), device, formats.shift),
    )
