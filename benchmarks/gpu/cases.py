"""What checks, times and tuning of single kernels share: where they run, and a mixing layer over given projections."""

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.gpu.weights import random_model
from stoker.backends.family import PAGE_SIZE
from stoker.backends.gpu.kernels.attention import Pages, attention
from stoker.backends.gpu.kernels.deltanet import DeltaRing, deltanet
from stoker.backends.gpu.kernels.launch import Workspace
from stoker.backends.gpu.state import Bucket, GpuCache, StepBuffers, StepInputs, heads_of
from stoker.backends.gpu.weights import AttentionLayer, DeltaLayer
from stoker.backends.network.cache import KVPages
from stoker.weights.model_config import ModelConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # cpu: Triton's interpreter, in tests


def workspace(tokens: int) -> Workspace:
    return Workspace.allocate(6 * tokens * 8192, 20000, DEVICE)


def only(config: ModelConfig, kind: str, layers: int) -> ModelConfig:
    """So many layers of one kind."""
    return replace(config, layer_types=(kind,) * layers, sparse_layers=(True,) * layers)


class MixerCase:
    """One DeltaNet or attention layer over blocks of tokens whose projections are given."""

    def __init__(self, config: ModelConfig, kind: str, fp8: bool = False, positions: int = 8192) -> None:
        self.config, self.kind, self.fp8 = config, kind, fp8
        model = random_model(only(config, kind, 1), "int4", DEVICE, positions)
        self.mixer = model.layers[0].mixer

    def state(self, batch: int, rows: int, splits: int) -> KVPages | DeltaRing:
        torch.manual_seed(1)
        dtype = torch.float8_e4m3fn if self.fp8 else torch.bfloat16
        cache = GpuCache.allocate(
            self.config, pages=batch * splits * 4, slots=batch, window=rows, device=DEVICE, kv_dtype=dtype,
            kinds=[self.kind],
        )  # fmt: skip
        return cache.layers[0]

    def past(self, batch: int, rows: int, splits: int) -> KVPages:
        """Pages full of random keys and values, the same each time."""
        state = self.state(batch, rows, splits)
        assert isinstance(state, KVPages)
        for part in (state.keys, state.values):
            part.copy_(torch.randn(part.shape, device=DEVICE))
        for scales in (state.key_scales, state.value_scales):
            if scales is not None:
                scales.copy_(torch.rand(scales.shape, device=DEVICE) + 0.5)
        return state

    def run(self, y: Tensor, rows: int, splits: int = 4, context: int = 0) -> Tensor:
        """y [B, T, width] behind so many random keys, in blocks of `rows` tokens, all accepted -> [B, T, out]"""
        batch, count, width = y.shape
        bucket = Bucket(batch, rows, splits)
        state = self.past(batch, rows, splits) if context else self.state(batch, rows, splits)
        inputs = StepInputs.allocate(bucket, PAGE_SIZE, DEVICE)
        inputs.sequences.cached.fill_(context)
        inputs.tables.copy_(torch.arange(batch * splits * 4, device=DEVICE).view(batch, -1))
        inputs.sequences.slots.copy_(torch.arange(batch, device=DEVICE))
        buffers = StepBuffers.allocate(self.config, bucket, 0, DEVICE)
        found = []
        for start in range(0, count, rows):
            block = y[:, start : start + rows]
            length = block.shape[1]
            if length < rows:
                block = torch.cat([block, block.new_zeros(batch, rows - length, width)], dim=1)
            inputs.sequences.lengths.fill_(length)
            # single rows of several sequences lie apart, and reshaping alone would leave them there
            self.launch(block.reshape(-1, width).contiguous(), inputs, buffers, state)
            found.append(buffers.mixed[self.kind].view(batch, rows, -1)[:, :length].clone())
            inputs.sequences.cached.add_(length)
            inputs.sequences.replay.fill_(length)
        return torch.cat(found, dim=1)

    def launch(self, y: Tensor, inputs: StepInputs, buffers: StepBuffers, state: KVPages | DeltaRing) -> None:
        mixed = buffers.mixed[self.kind]
        if isinstance(state, DeltaRing):
            assert isinstance(self.mixer, DeltaLayer)
            deltanet(y, mixed, state, self.mixer.weights, inputs.sequences)
            return
        assert isinstance(self.mixer, AttentionLayer)
        pages = Pages(state.keys, state.values, inputs.tables, state.key_scales, state.value_scales)
        attention(
            y, mixed, pages, self.mixer.weights, heads_of(self.config), inputs.sequences, buffers.partials,
            buffers.workspace,
        )  # fmt: skip
