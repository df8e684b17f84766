"""Drafting with the MTP head on the GPU, in fixed shapes: one pass over a step's rows, then one row a draft.

The first pass feeds every row of the step with the token that follows it, which fills the head's keys and values of
what was accepted; rows of rejected drafts leave keys that the next step overwrites before anyone sees them. What the
head put out at a sequence's last token stays with its slot, so that the sequences drafted for need not be those of the
step before.
"""

import torch
from torch import Tensor

from stoker.backends.family import PAGE_SIZE
from stoker.backends.gpu.kernels.linear import Norm, Stream, linear
from stoker.backends.gpu.kernels.rows import MtpNorms, begin, best_tokens, mtp_inputs
from stoker.backends.gpu.state import Bucket, GpuCache, StepBuffers, StepInputs
from stoker.backends.gpu.step import Step, run_layer
from stoker.backends.gpu.weights import MtpWeights, StepWeights
from stoker.weights.model_config import FULL, ModelConfig


class Mtp:
    """The head's weights, its keys and values, and what it put out at the last token of each slot."""

    def __init__(self, config: ModelConfig, weights: StepWeights, pages: int, slots: int, pdl: bool = True) -> None:
        if weights.mtp is None:
            raise ValueError("this model has no MTP head")
        self.config, self.weights, self.mtp, self.pdl = config, weights, weights.mtp, pdl
        device = weights.embedding.device
        self.pages = GpuCache.allocate(config, pages=pages, slots=1, window=1, device=device, kinds=[FULL]).layers[0]
        # the last row is nobody's: what pads a batch goes there
        self.last = torch.zeros(slots + 1, config.hidden_size, dtype=torch.bfloat16, device=device)
        self._joined = self.last.new_zeros(1, 2 * config.hidden_size)

    def forward(
        self, ids: Tensor, x: Tensor, norms: MtpNorms, joined: Tensor, inputs: StepInputs, buffers: StepBuffers
    ) -> None:
        """The head's layer over rows of the stream x and the tokens after them; `buffers` then hold its own stream."""
        mtp, pdl = self.mtp, self.pdl
        mtp_inputs(ids, self.weights.embedding, x, norms, joined, pdl)
        linear(joined, mtp.fc, buffers.x, buffers.workspace, None, pdl)
        begin(Stream(buffers.x, mtp.layer.input_norm, buffers.scaled), buffers.squares, None, None, pdl)
        run_layer(self.config, mtp.layer, self.pages, inputs, buffers, buffers.routing[0], mtp.norm, pdl)

    def joined(self, tokens: int) -> Tensor:
        """Room for a pass over so many rows; passes run one after the other."""
        if tokens > len(self._joined):
            self._joined = self.last.new_zeros(tokens, 2 * self.config.hidden_size)
        return self._joined[:tokens]


class MtpObserve:
    """The pass over the rows of one step. To be filled in: `following` [T], the token after each row, `last_rows` [B],
    the row of each sequence's last token, and `slots` [B], all int32."""

    def __init__(self, mtp: Mtp, step: Step, numbers: Tensor | None = None, buffers: StepBuffers | None = None) -> None:
        """They lie in `numbers` [T + 2 B], in this order, if given."""
        bucket, device = step.bucket, mtp.last.device
        if numbers is None:
            numbers = torch.zeros(bucket.tokens + 2 * bucket.sequences, dtype=torch.int32, device=device)
        self.following, self.last_rows, self.slots = numbers.split([bucket.tokens, bucket.sequences, bucket.sequences])
        self._mtp, self._step = mtp, step
        self._buffers = buffers or StepBuffers.allocate(mtp.config, bucket, 1, device)
        self._joined = mtp.joined(bucket.tokens)

    def run(self) -> None:
        mtp, step, buffers = self._mtp, self._step, self._buffers
        mtp.forward(self.following, step.buffers.x, mtp.mtp.first, self._joined, step.inputs, buffers)
        mtp.last.index_copy_(0, self.slots.long(), buffers.x.index_select(0, self.last_rows))


class MtpPropose:
    """Drafts for the sequences of a bucket of one row: `first`, then `next` once for each further one.

    To be filled in: `inputs` (slots; cached, the last position the head has seen; page tables) and `depths` [B] int32,
    past which a sequence writes no keys. Draft j of sequence b is tokens[j, b], with the probability sure[j, b].
    """

    def __init__(
        self, mtp: Mtp, bucket: Bucket, depth: int, inputs: StepInputs | None = None,
        buffers: StepBuffers | None = None,
    ) -> None:  # fmt: skip
        device, count = mtp.last.device, bucket.sequences
        self._mtp, self.depth = mtp, depth
        self.inputs = inputs or StepInputs.allocate(bucket, PAGE_SIZE, device)
        self.buffers = buffers or StepBuffers.allocate(mtp.config, bucket, 1, device, logits=True)
        self._joined = mtp.joined(count)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self.results = torch.zeros(2, depth, count, dtype=torch.int32, device=device)  # one read for both
        self.tokens, self.sure = self.results[0], self.results[1].view(torch.float32)

    @property
    def depths(self) -> Tensor:
        """Where a step has the tokens to replay, of which there are none here."""
        return self.inputs.sequences.replay

    def first(self) -> None:
        mtp, own = self._mtp, self.buffers
        own.x.copy_(mtp.last.index_select(0, self.inputs.sequences.slots))
        begin(Stream(own.x, mtp.mtp.norm, own.scaled), own.squares, None, None, mtp.pdl)
        self._place.zero_()
        self._guess()

    def next(self) -> None:
        mtp, own, sequences = self._mtp, self.buffers, self.inputs.sequences
        self._place.add_(1)
        sequences.cached.add_(1)  # a draft's keys lie behind those of the one before
        sequences.lengths.copy_(self.depths > self._place)
        mtp.forward(own.tokens, own.x, mtp.mtp.again, self._joined, self.inputs, own)
        self._guess()

    def _guess(self) -> None:
        mtp, own = self._mtp, self.buffers
        norm = Norm(own.squares, mtp.config.rms_norm_eps)
        linear(own.scaled, mtp.weights.head, own.best, own.workspace, norm, mtp.pdl)
        best_tokens(own.best, mtp.config.vocab_size, own.tokens, mtp.pdl)
        self.tokens.index_copy_(0, self._place, own.tokens[None])
        if own.best.logits is not None:
            self.sure.index_copy_(0, self._place, confidence(own.best.values, own.best.logits)[None])


def confidence(values: Tensor, logits: Tensor) -> Tensor:
    """Probability [T] of the best token, from the largest logit of every 16 rows and all logits."""
    return (values.amax(1) - logits.logsumexp(1)).exp()


def mtp_bytes(weights: MtpWeights) -> int:
    """Read by every pass, experts apart."""
    layer = weights.layer
    parts = [weights.fc, layer.mixer.inputs, layer.mixer.out, layer.moe.router]
    parts += [part for part in (layer.moe.shared_gate_up, layer.moe.shared_down) if part is not None]
    return sum(part.nbytes for part in parts)
