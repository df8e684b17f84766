"""Drafting with the MTP head on the GPU, in the same fixed shapes: one pass over a step's rows, then one row a draft.

The first pass feeds every row of the step with the token the model chose after it, which fills the head's keys and
values of what was accepted; rows of rejected drafts leave keys that the next step overwrites before anyone sees them.
"""

import torch
from torch import Tensor

from stoker.engine.gpu.state import Bucket, GpuCache, StepBuffers, StepInputs
from stoker.engine.gpu.step import Step, run_layer
from stoker.engine.gpu.weights import MtpWeights
from stoker.model.cache import PAGE_SIZE
from stoker.model.config import FULL
from stoker.ops.triton.linear import Norm, Stream, linear
from stoker.ops.triton.rows import MtpNorms, begin, best_tokens, mtp_inputs


class MtpDraft:
    """`depth` drafts after each step; `drafts` [B, depth] int32."""

    def __init__(self, step: Step, pages: int, depth: int) -> None:
        if step.weights.mtp is None:
            raise ValueError("this model has no MTP head")
        if depth < 1:
            raise ValueError(f"a draft has one or more tokens, not {depth}")
        self._step, self._weights, self.depth = step, step.weights.mtp, depth
        config, device, bucket = step.config, step.weights.embedding.device, step.bucket
        one = Bucket(bucket.sequences, 1, bucket.splits)
        cache = GpuCache.allocate(config, pages=pages, slots=1, window=1, device=device, kinds=[FULL])
        self._pages = cache.layers[0]
        self._rows = StepBuffers.allocate(config, bucket, 1, device)
        self._one = StepBuffers.allocate(config, one, 1, device)
        self._one_inputs = StepInputs.allocate(one, PAGE_SIZE, device)
        hidden = config.hidden_size
        self._joined = torch.empty(bucket.tokens, 2 * hidden, dtype=torch.bfloat16, device=device)
        self._joined_one = torch.empty(one.tokens, 2 * hidden, dtype=torch.bfloat16, device=device)
        self.drafts = torch.zeros(bucket.sequences, depth, dtype=torch.int32, device=device)

    def draft(self, last_rows: Tensor) -> None:
        """`last_rows` [B] int64: each sequence's last accepted row of the step just made."""
        step, rows, one = self._step, self._rows, self._one
        self._pass(step.buffers.tokens, step.buffers.x, self._weights.first, self._joined, step.inputs, rows)
        for source, target in ((rows.x, one.x), (rows.scaled, one.scaled), (rows.squares, one.squares)):
            torch.index_select(source, 0, last_rows, out=target)
        self._guess(0)
        inputs = self._one_inputs
        inputs.tables.copy_(step.inputs.tables)
        # a draft's keys lie behind those of the last accepted row
        place = last_rows.remainder(step.bucket.rows).int()
        torch.add(step.inputs.sequences.cached, place, out=inputs.sequences.cached)
        for index in range(1, self.depth):
            inputs.sequences.cached.add_(1)
            self._pass(one.tokens, one.x, self._weights.again, self._joined_one, inputs, one)
            self._guess(index)

    def _guess(self, index: int) -> None:
        step, one = self._step, self._one
        norm = Norm(one.squares, step.config.rms_norm_eps)
        linear(one.scaled, step.weights.head, one.best, one.workspace, norm, step.pdl)
        best_tokens(one.best, step.config.vocab_size, one.tokens, step.pdl)
        self.drafts[:, index].copy_(one.tokens)

    def _pass(
        self, ids: Tensor, x: Tensor, norms: MtpNorms, joined: Tensor, inputs: StepInputs, buffers: StepBuffers
    ) -> None:
        """The head's layer over rows of the stream x and the tokens after them; `buffers` then hold its own stream."""
        step, weights = self._step, self._weights
        mtp_inputs(ids, step.weights.embedding, x, norms, joined, step.pdl)
        linear(joined, weights.fc, buffers.x, buffers.workspace, None, step.pdl)
        begin(Stream(buffers.x, weights.layer.input_norm, buffers.scaled), buffers.squares, None, None, step.pdl)
        run_layer(step.config, weights.layer, self._pages, inputs, buffers, buffers.routing[0], weights.norm, step.pdl)


def mtp_bytes(weights: MtpWeights) -> int:
    """Read by every pass, experts apart."""
    layer = weights.layer
    parts = [weights.fc, layer.mixer.inputs, layer.mixer.out, layer.moe.router]
    parts += [part for part in (layer.moe.shared_gate_up, layer.moe.shared_down) if part is not None]
    return sum(part.nbytes for part in parts)
