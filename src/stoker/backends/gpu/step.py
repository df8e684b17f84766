"""One forward of a bucket: a fixed list of launches over fixed tensors, without allocation or a look at the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker.backends.family import PAGE_SIZE
from stoker.backends.gpu.kernels.attention import Pages, attention
from stoker.backends.gpu.kernels.deltanet import DeltaRing, deltanet
from stoker.backends.gpu.kernels.experts import experts
from stoker.backends.gpu.kernels.linear import Norm, Stream, linear
from stoker.backends.gpu.kernels.route import Routing, route
from stoker.backends.gpu.kernels.rows import begin, best_tokens
from stoker.backends.gpu.state import Bucket, GpuCache, StepBuffers, StepInputs, heads_of
from stoker.backends.gpu.weights import AttentionLayer, LayerWeights, StepWeights
from stoker.backends.network.cache import KVPages
from stoker.weights.model_config import FULL, LINEAR, ModelConfig

FIRST_LAYERS = 4


class Step:
    """Embeds `inputs.token_ids`, runs every layer and leaves the best token after each row in `buffers.tokens`.

    `features` [T, n * H] are the streams after the layers of `taps`, side by side, for a drafter that reads them.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: StepWeights,
        cache: GpuCache,
        bucket: Bucket,
        *,
        logits: bool = False,
        pdl: bool = True,
        taps: Sequence[int] = (),
        inputs: StepInputs | None = None,
        buffers: StepBuffers | None = None,
        features: Tensor | None = None,
    ) -> None:
        """`inputs`, `buffers` and `features` of this bucket or larger, if their memory is shared with others; `logits`:
        all of them are stored."""
        self.config, self.weights, self.cache, self.bucket, self.pdl = config, weights, cache, bucket, pdl
        device = weights.embedding.device
        self.inputs = inputs or StepInputs.allocate(bucket, PAGE_SIZE, device)
        self.buffers = buffers or StepBuffers.allocate(config, bucket, len(weights.layers), device, logits)
        self._taps = tuple(taps)
        if features is None:
            features = torch.zeros(bucket.tokens, len(taps) * config.hidden_size, dtype=torch.bfloat16, device=device)
        self.features = features[: bucket.tokens]

    def forward(self) -> None:
        self.first()
        self.rest()

    def first(self) -> None:
        """Embedding and the first layers: enough work for the host to launch the rest meanwhile."""
        buffers, weights = self.buffers, self.weights
        start = Stream(buffers.x, weights.layers[0].input_norm, buffers.scaled)
        begin(start, buffers.squares, self.inputs.token_ids, weights.embedding, self.pdl)
        for index in range(min(FIRST_LAYERS, len(weights.layers))):
            self._layer(index)

    def rest(self) -> None:
        for index in range(FIRST_LAYERS, len(self.weights.layers)):
            self._layer(index)
        self.choose(alone=len(self.weights.layers) <= FIRST_LAYERS)

    def _layer(self, index: int) -> None:
        layers, buffers = self.weights.layers, self.buffers
        following = layers[index + 1].input_norm if index + 1 < len(layers) else self.weights.norm
        run_layer(
            self.config, layers[index], self.cache.layers[index], self.inputs, buffers, buffers.routing[index],
            following, self.pdl, alone=index == FIRST_LAYERS,
        )  # fmt: skip
        if index in self._taps:
            self.features.unflatten(1, (len(self._taps), -1))[:, self._taps.index(index)].copy_(buffers.x)

    def choose(self, alone: bool = False) -> None:
        """The head over the stream as it stands, and the best token of each row; `alone` as in `run_layer`."""
        buffers = self.buffers
        norm = Norm(buffers.squares, self.config.rms_norm_eps)
        linear(buffers.scaled, self.weights.head, buffers.best, buffers.workspace, norm, self.pdl and not alone)
        best_tokens(buffers.best, self.config.vocab_size, buffers.tokens, self.pdl)


def run_layer(
    config: ModelConfig,
    layer: LayerWeights,
    state: KVPages | DeltaRing,
    inputs: StepInputs,
    buffers: StepBuffers,
    routing: Routing,
    next_scale: Tensor,
    pdl: bool,
    alone: bool = False,
) -> None:
    """Six launches, as a rule. `buffers` hold the stream prepared for the first norm, afterwards for `next_scale`.
    `alone`: nothing was launched before it in the same graph, for which the first could wait inside."""
    assert config.moe is not None
    eps, space = config.rms_norm_eps, buffers.workspace
    kind = FULL if isinstance(state, KVPages) else LINEAR
    rows, width = buffers.x.shape[0], layer.mixer.inputs.out_features
    projected, mixed = buffers.projected[kind].view(-1)[: rows * width].view(rows, width), buffers.mixed[kind]
    norm = Norm(buffers.squares, eps)
    linear(buffers.scaled, layer.mixer.inputs, projected, space, norm, pdl and not alone)
    if isinstance(state, KVPages):
        assert isinstance(layer.mixer, AttentionLayer)
        pages = Pages(state.keys, state.values, inputs.tables, state.key_scales, state.value_scales)
        attention(
            projected, mixed, pages, layer.mixer.weights, heads_of(config), inputs.sequences, buffers.partials, space,
            pdl,
        )  # fmt: skip
    else:
        assert not isinstance(layer.mixer, AttentionLayer)
        gates = layer.mixer.gates
        if gates is not None:  # a seventh launch
            linear(buffers.scaled, gates, buffers.gates, space, norm, pdl)
        apart = None if gates is None else buffers.gates
        deltanet(projected, mixed, state, layer.mixer.weights, inputs.sequences, pdl, apart)
    linear(mixed, layer.mixer.out, Stream(buffers.x, layer.post_norm, buffers.scaled), space, None, pdl)
    moe = layer.moe
    route(
        buffers.x, buffers.scaled, moe.router, routing, space, eps=eps, renormalize=config.moe.renormalize,
        shared=moe.shared_gate_up is not None, pdl=pdl, sequences=inputs.sequences,
    )  # fmt: skip
    stream = Stream(buffers.x, layer.post_norm, buffers.scaled)
    experts(
        stream, routing, moe.gate_up, moe.down, moe.shared_gate_up, moe.shared_down, buffers.experts, buffers.squares,
        space, next_scale, eps=eps, pdl=pdl,
    )  # fmt: skip
