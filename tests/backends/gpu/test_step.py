"""The GPU step in Triton's interpreter, against the model that the CPU runs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stoker.backends.family import Family
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.cache import Cache
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.linear import Weight
from stoker.weights.formats.fp8 import Fp8Block
from stoker.weights.formats.int4 import Int4
from stoker.weights.formats.int8 import Int8Row
from stoker.weights.model_config import ModelConfig
from tests.support.random_checkpoint import random_tensors, small_config

pytest.importorskip("triton")


def test_steps_with_a_rejected_draft_match_the_model(interpreter) -> None:
    interpreter(check_logits)


def test_the_host_reads_how_many_experts_a_layer_had(interpreter) -> None:
    interpreter(check_counts)


def test_a_dense_model_is_refused_by_name(interpreter) -> None:
    interpreter(check_dense)


def model(mtp: bool = False) -> Decoder:
    raw = small_config(
        num_hidden_layers=2, full_attention_interval=2, vocab_size=64, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=128, shared_expert_intermediate_size=128, linear_key_head_dim=64,
        linear_value_head_dim=64, linear_num_key_heads=1, linear_num_value_heads=2,
    )  # fmt: skip
    decoder = Decoder(ModelConfig.from_dict(raw, where="test"), mtp=mtp)
    for (_, values), parameter in zip(random_tensors(decoder, True, 3), decoder.parameters(), strict=True):
        kept = parameter.dtype if parameter.dtype is not torch.float32 else torch.bfloat16
        parameter.data = values.to(kept)
    for name, parameter in decoder.named_parameters():
        if name.endswith(("A_log", "linear_attn.norm.weight")):
            parameter.data = parameter.data.float()
    return decoder


def quantize(decoder: Decoder) -> None:
    """As published: INT4 projections and experts, FP8 shared expert, INT8 head; the rest stays in 16 bit."""

    network: Any = decoder

    def hang(owner: nn.Module, name: str, weight: Weight) -> None:
        delattr(owner, name)
        setattr(owner, name, weight)

    for layer in network.layers:
        mlp = layer.mlp
        hang(mlp.experts, "gate_up_proj", Int4.quantize(mlp.experts.gate_up_proj))
        hang(mlp.experts, "down_proj", Int4.quantize(mlp.experts.down_proj))
        for part in (mlp.shared_expert.gate_proj, mlp.shared_expert.up_proj, mlp.shared_expert.down_proj):
            hang(part, "weight", Fp8Block.quantize(part.weight))
        if hasattr(layer, "linear_attn"):  # a and b stay as they are, and so come apart
            for part in (layer.linear_attn.in_proj_qkv, layer.linear_attn.in_proj_z, layer.linear_attn.out_proj):
                hang(part, "weight", Int4.quantize(part.weight))
    hang(network.lm_head, "weight", Int8Row.quantize(network.lm_head.weight))


def check_logits() -> None:
    """Two tokens, of which the second is rejected, then two more; weights of four formats."""
    from stoker.backends.gpu.state import Bucket, GpuCache
    from stoker.backends.gpu.step import Step
    from stoker.backends.gpu.weights import pack_decoder

    decoder = model()
    quantize(decoder)
    cache = GpuCache.allocate(decoder.config, pages=4, slots=2, window=2, device="cpu")
    step = Step(decoder.config, pack_decoder(decoder, 64), cache, Bucket(1, 2, 1), logits=True)
    step.inputs.tables.copy_(torch.tensor([[2, 0, 1, 3]]))
    step.inputs.sequences.slots.fill_(1)

    def logits(tokens: list[int], cached: int, replay: int) -> Tensor:
        step.inputs.token_ids.copy_(torch.tensor(tokens))
        step.inputs.sequences.cached.fill_(cached)
        step.inputs.sequences.replay.fill_(replay)
        step.forward()
        found = step.buffers.best.logits
        assert found is not None
        assert torch.equal(step.buffers.tokens.long(), found.argmax(-1))
        return found.clone()

    found = torch.cat([logits([5, 60], 0, 0)[:1], logits([17, 33], 1, 1)])
    whole = Cache.allocate(decoder.config, pages=1, slots=1, window=3)
    with torch.inference_mode():
        hidden, _ = decoder(Batch.of(Family.STEP, [Run([5, 17, 33], 0, 0, [0])], 64), whole)
        expected = decoder.logits(hidden)
    for row in range(3):
        # the interpreter rounds bf16 towards zero; a missing norm, gate or token is ten times as far off
        assert float((found[row] - expected[row]).norm() / expected[row].norm()) < 0.06, row


def check_counts() -> None:
    """Buckets in one memory, with a sequence that is none and rows that are no tokens: they choose no expert."""
    from stoker.backends.gpu.state import Bucket, GpuCache, StepBuffers, StepInputs
    from stoker.backends.gpu.step import Step
    from stoker.backends.gpu.weights import pack_decoder

    decoder = model()
    cache = GpuCache.allocate(decoder.config, pages=4, slots=2, window=3, device="cpu")
    weights = pack_decoder(decoder, 64)
    buckets = [Bucket(1, 1, 1), Bucket(2, 2, 1), Bucket(2, 3, 1)]  # of one token, grouped at once, by another launch
    shared = StepBuffers.shared(decoder.config, buckets, 2, "cpu", logits=False)
    ids, counted = torch.tensor([5, 17, 33, 5, 20, 41]), []
    for bucket, buffers, lengths in zip(buckets, shared, ([1], [1, 0], [3, 2]), strict=True):
        inputs = StepInputs.allocate(bucket, 64, "cpu")
        inputs.tables.copy_(torch.arange(4).expand(bucket.sequences, -1))
        inputs.sequences.slots.copy_(torch.arange(bucket.sequences))
        inputs.sequences.lengths.copy_(torch.tensor(lengths))
        inputs.token_ids.copy_(ids[: bucket.tokens])
        Step(decoder.config, weights, cache, bucket, inputs=inputs, buffers=buffers).forward()
        read = buffers.results.clone()
        tokens, experts = buffers.chosen(read), buffers.distinct_experts(read)
        assert tokens == buffers.tokens.tolist()
        chosen = [set(routing.experts.flatten().tolist()) - {-1} for routing in buffers.routing]
        assert experts == sum(map(len, chosen)) / 2
        counted.append(experts)
    assert counted[:2] == [2.0, 2.0]
    assert counted[2] > 2.0


def check_dense() -> None:
    from stoker.backends.gpu.weights import pack_decoder
    from stoker.errors import ConfigError

    raw = small_config("qwen3_5_text", num_hidden_layers=1, layer_types=["full_attention"])
    with pytest.raises(ConfigError, match="this layer is dense"):
        pack_decoder(Decoder(ModelConfig.from_dict(raw, where="test"), mtp=False), 64)
