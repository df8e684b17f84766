"""A network's weights as the step kernels read them, and how a loaded model becomes that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stoker.backends.gpu.kernels.attention import AttentionWeights
from stoker.backends.gpu.kernels.deltanet import DeltaWeights
from stoker.backends.gpu.kernels.rows import MtpNorms
from stoker.backends.gpu.packed import (
    GROUP,
    ROW_PADDING,
    Kind,
    PackedWeight,
    empty_weight,
    join_rows,
    pack_bf16,
    pack_fp8,
    pack_int4,
    pack_int8,
    pack_nvfp4,
)
from stoker.backends.network.attention import Attention, rope_table
from stoker.backends.network.decoder import Decoder, DecoderLayer
from stoker.backends.network.deltanet import GatedDeltaNet
from stoker.backends.network.experts import SparseMlp
from stoker.backends.network.linear import Weight
from stoker.backends.network.norm import RMSNorm
from stoker.errors import ConfigError
from stoker.weights.formats.base import WeightFormat
from stoker.weights.formats.fp8 import Fp8Block, Fp8Row
from stoker.weights.formats.int4 import Int4
from stoker.weights.formats.int4_ct import Int4Ct
from stoker.weights.formats.int8 import Int8Row
from stoker.weights.formats.joined import Joined
from stoker.weights.formats.nvfp4 import Nvfp4
from stoker.weights.model_config import ModelConfig


@dataclass(frozen=True)
class DeltaLayer:
    inputs: PackedWeight  # q, k, v, z, and a, b where they are of the same format
    weights: DeltaWeights
    out: PackedWeight
    gates: PackedWeight | None = None  # a, b where they are not


@dataclass(frozen=True)
class AttentionLayer:
    inputs: PackedWeight  # q and gate head by head, k, v
    weights: AttentionWeights
    out: PackedWeight


@dataclass(frozen=True)
class MoeLayer:
    router: PackedWeight  # the shared expert's gate is its last row
    gate_up: PackedWeight
    down: PackedWeight
    shared_gate_up: PackedWeight | None
    shared_down: PackedWeight | None


@dataclass(frozen=True)
class LayerWeights:
    input_norm: Tensor  # [H] fp32, the offset added
    mixer: DeltaLayer | AttentionLayer
    post_norm: Tensor
    moe: MoeLayer


@dataclass(frozen=True)
class MtpWeights:
    first: MtpNorms  # of a draft from the trunk's stream
    again: MtpNorms  # of a draft from the head's own
    fc: PackedWeight
    layer: LayerWeights
    norm: Tensor


@dataclass(frozen=True)
class StepWeights:
    embedding: Tensor  # [vocab, H] bf16
    layers: Sequence[LayerWeights]
    norm: Tensor
    head: PackedWeight
    mtp: MtpWeights | None = None


def pack_decoder(
    model: Decoder,
    positions: int,
    release: bool = False,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> StepWeights:
    """A loaded model for the step kernels, on the device it lies on. `positions` is the longest context. `progress` is
    told how many layers are packed, and how many there are.

    With `release` the model lets go of each layer once it is packed: never are two copies of more than one in memory.
    It keeps its embedding and the sizes of all else.
    """
    config = model.config
    rope = rope_of(positions, config.rope_theta, config.rotary_dim, model.embed_tokens.weight.device)
    norm = scale_of(model.norm)
    mtp = None
    if model.mtp is not None:
        head, last = model.mtp, scale_of(model.mtp.norm)
        both = scale_of(head.pre_fc_norm_hidden), scale_of(head.pre_fc_norm_embedding)
        layer = head.layers[0]
        assert isinstance(layer, DecoderLayer)
        mtp = MtpWeights(
            first=MtpNorms(norm, *both, config.rms_norm_eps),
            again=MtpNorms(last, *both, config.rms_norm_eps),
            fc=pack([head.fc.weight]),
            layer=_layer(layer, config, rope),
            norm=last,
        )
        if release:
            let_go(head)
    layers: list[LayerWeights] = []
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        progress(len(layers), len(model.layers))
        layers.append(_layer(layer, config, rope))
        if release:
            let_go(layer)
    embedding, output = model.embed_tokens.weight, pack([model.lm_head.weight])
    if release and model.lm_head.weight is not embedding:
        let_go(model.lm_head)
    return StepWeights(embedding, layers, norm, output, mtp)


def rope_of(positions: int, theta: float, rotary_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the first positions."""
    if device.type == "meta":  # where arithmetic would import half of torch
        shape = (positions, rotary_dim // 2)
        return torch.empty(shape, device=device), torch.empty(shape, device=device)
    return rope_table(torch.arange(positions, device=device), theta, rotary_dim)


def let_go(module: nn.Module) -> None:
    """Frees the memory of a module's weights. Their shapes and sizes stay, for whoever counts bytes."""
    for part in module.modules():
        for name, value in [*vars(part).items(), *part.named_parameters(recurse=False)]:
            if isinstance(value, nn.Parameter):
                setattr(part, name, nn.Parameter(value.to("meta"), requires_grad=False))
            elif isinstance(value, WeightFormat):
                setattr(part, name, _emptied(value))
            elif isinstance(value, Joined):
                setattr(part, name, Joined(tuple(_emptied(each) for each in value.parts)))


def _emptied(weight: WeightFormat) -> WeightFormat:
    return replace(weight, **{name: tensor.to("meta") for name, tensor in weight.tensors().items()})


def pack(weights: Sequence[Weight]) -> PackedWeight:
    """Projections of one input as one weight, rows one above the other, in the format they are stored in."""
    if (sizes := _sizes(weights)) is not None:
        return sizes
    if all(isinstance(weight, Tensor) for weight in weights):
        return pack_bf16(torch.cat([weight.bfloat16() for weight in weights if isinstance(weight, Tensor)], dim=-2))
    parts = [part for weight in weights for part in (weight.parts if isinstance(weight, Joined) else (weight,))]
    int4 = [part for part in parts if isinstance(part, Int4)]
    if len(int4) == len(parts):
        for part in int4:
            if part.group != 128:
                raise ConfigError(f"the GPU kernels read INT4 in groups of 128 inputs, found groups of {part.group}.")
        words = torch.cat([part.qweight for part in int4], dim=-1)
        return pack_int4(words, torch.cat([part.scales for part in int4], dim=-1))
    return join_rows(*(_packed(part) for part in parts))


KINDS: dict[type, Kind] = {
    Int4: Kind.INT4, Fp8Block: Kind.FP8, Int8Row: Kind.INT8, Nvfp4: Kind.NVFP4, Tensor: Kind.BF16,
    nn.Parameter: Kind.BF16,
}  # fmt: skip


def _sizes(weights: Sequence[Weight]) -> PackedWeight | None:
    """Without memory, what `pack` makes of weights without memory: a start counts bytes that way, and packing the
    122B so, operation by operation, took six seconds. None for weights that have memory or cannot be packed."""
    parts = [part for weight in weights for part in (weight.parts if isinstance(weight, Joined) else (weight,))]
    if not all(_is_meta(part) for part in parts):
        return None
    kinds = {KINDS.get(type(part)) for part in parts}
    kind = kinds.pop()
    (*lead, _, inputs), outs = parts[0].shape, [part.shape[-2] for part in parts]
    joins = kind in (Kind.INT4, Kind.BF16) or not any(out % ROW_PADDING for out in outs[:-1])
    grouped = all(part.group == GROUP for part in parts if isinstance(part, Int4))
    if kind is None or kinds or not joins or not grouped or inputs % GROUP:
        return None
    return empty_weight(kind, tuple(lead), sum(outs), inputs, "meta")


def _is_meta(part: object) -> bool:
    if isinstance(part, WeightFormat):
        return all(tensor.is_meta for tensor in part.tensors().values())
    return isinstance(part, Tensor) and part.is_meta


def _packed(weight: Weight) -> PackedWeight:
    match weight:
        case Tensor():
            return pack_bf16(weight.bfloat16())
        case Fp8Block():
            return pack_fp8(weight.weight, weight.weight_scale_inv)
        case Int8Row():
            return pack_int8(weight.weight, weight.weight_scale)
        case Nvfp4():
            factor = (1.0 / weight.weight_global_scale).expand(weight.weight_packed.shape[:-1])
            return pack_nvfp4(weight.weight_packed, weight.weight_scale, factor)
        case Fp8Row():
            raise ConfigError(
                "the GPU kernels read FP8 with scales per 128x128 block, and this checkpoint has one per row: use the "
                "model's FP8 release with weight_block_size [128, 128], or stoker build --quantize fp8 from BF16."
            )
        case Int4Ct():
            raise ConfigError(
                "the GPU kernels read INT4 with fp16 scales, and this checkpoint has scales that fp16 cannot hold: use "
                "an AutoRound or GPTQ release, or stoker build --quantize int4 from BF16."
            )
    raise ConfigError(f"the GPU kernels do not read {type(weight).__name__} beside other formats.")


def scale_of(norm: RMSNorm) -> Tensor:
    size = norm.weight.shape[0]
    if norm.weight.is_meta:  # as in `rope_of`; a norm has it twice
        return torch.empty(2 * size, dtype=torch.float32, device="meta")[:size]
    return norm.scale()[:size].contiguous()


def _layer(layer: DecoderLayer, config: ModelConfig, rope: tuple[Tensor, Tensor]) -> LayerWeights:
    if not isinstance(layer.mlp, SparseMlp):
        raise ConfigError("the GPU step computes mixtures of experts; this layer is dense.")
    delta = hasattr(layer, "linear_attn")
    mixer = _delta(layer.linear_attn) if delta else _attention(layer.self_attn, config, rope)
    return LayerWeights(
        scale_of(layer.input_layernorm), mixer, scale_of(layer.post_attention_layernorm), _moe(layer.mlp)
    )


def _delta(net: GatedDeltaNet) -> DeltaLayer:
    first = [net.in_proj_qkv.weight, net.in_proj_z.weight]
    second = [net.in_proj_a.weight, net.in_proj_b.weight]
    alike = len({isinstance(weight, Tensor) or type(weight) for weight in first + second}) == 1
    return DeltaLayer(
        inputs=pack(first + second if alike else first),
        gates=None if alike else pack(second),
        weights=DeltaWeights(
            conv=net.conv1d.weight[:, 0].t().float().contiguous(),
            decay=_decay(net.A_log),
            bias=net.dt_bias.float(),
            norm=net.norm.weight.float(),
            eps=net.norm.eps,
        ),
        out=pack([net.out_proj.weight]),
    )


def _decay(logarithm: Tensor) -> Tensor:
    if logarithm.is_meta:  # as in `rope_of`
        return torch.empty(logarithm.shape, dtype=torch.float32, device="meta")
    return -torch.exp(logarithm.float())


def _attention(net: Attention, config: ModelConfig, rope: tuple[Tensor, Tensor]) -> AttentionLayer:
    return AttentionLayer(
        inputs=pack([net.q_proj.weight, net.k_proj.weight, net.v_proj.weight]),
        weights=AttentionWeights(scale_of(net.q_norm), scale_of(net.k_norm), *rope, config.rms_norm_eps),
        out=pack([net.o_proj.weight]),
    )


def _moe(mlp: SparseMlp) -> MoeLayer:
    shared = bool(mlp.moe.shared_intermediate_size)
    rows = [mlp.gate.weight, mlp.shared_expert_gate.weight] if shared else [mlp.gate.weight]
    first = second = None
    if shared:
        first = pack([mlp.shared_expert.gate_proj.weight, mlp.shared_expert.up_proj.weight])
        second = pack([mlp.shared_expert.down_proj.weight])
    return MoeLayer(pack(rows), pack([mlp.experts.gate_up_proj]), pack([mlp.experts.down_proj]), first, second)
