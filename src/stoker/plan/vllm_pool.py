"""vLLM's KV pool for models with several kinds of layers: pages of one size, shared by groups of layers.

vLLM gives every layer pages of the same bytes. For a hybrid the attention block grows until its page holds a recurrent
state (its convolution widened by the drafts); layers of a kind are split into groups as large as the smallest kind;
each group has its own block table over one pool. So a token costs more than its KV bytes, and a recurrent layer takes
whole pages. Tokens and concurrency below are what vLLM's start-up log prints.
"""

from dataclasses import dataclass
from math import ceil

from stoker.errors import RequestError
from stoker.plan.models import Model
from stoker.weights.model_config import FULL, LINEAR, SLIDING

KERNEL_BLOCK = 16  # attention blocks are multiples of this many tokens
CLOSE = 1.5  # kinds whose numbers of layers differ less than this are padded to the larger


@dataclass(frozen=True)
class Pool:
    block_tokens: int  # of an attention block
    page_bytes: int  # of one layer's block
    layers_per_group: int
    attention_groups: int
    recurrent_groups: int
    blocks: int
    blocks_per_request: int
    context: int
    bytes_per_token: float  # if only KV bytes counted
    state_bytes: int

    @property
    def groups(self) -> int:
        return self.attention_groups + self.recurrent_groups

    @property
    def tokens(self) -> int:
        """ "GPU KV cache size" of the log."""
        return self.blocks // self.groups * self.block_tokens

    @property
    def concurrency(self) -> float:
        """ "Maximum concurrency for N tokens per request" of the log."""
        return self.blocks / self.blocks_per_request

    @property
    def bytes(self) -> int:
        return self.blocks * self.layers_per_group * self.page_bytes

    @property
    def tokens_by_bytes(self) -> int:
        """What the same bytes would hold if one long sequence were all there is: KV alone, and one state."""
        return int((self.bytes - self.state_bytes) / self.bytes_per_token)

    @property
    def concurrency_by_bytes(self) -> float:
        return self.bytes / (self.context * self.bytes_per_token + self.state_bytes)


def block_tokens(model: Model, depth: int, kv_item: float) -> int:
    """Of an attention block: of a hybrid the least multiple of 16 whose page holds a recurrent layer's state."""
    recurrent = model.layers_of(LINEAR)
    if not recurrent or model.delta is None:
        return KERNEL_BLOCK
    return ceil(_state_bytes(model, depth) / _token_bytes(model, kv_item) / KERNEL_BLOCK) * KERNEL_BLOCK


def _state_bytes(model: Model, depth: int) -> int:
    """Of one recurrent layer, its convolution widened by the drafts."""
    assert model.delta is not None
    convolved = model.conv_bytes(model.delta.conv_kernel - 1 + depth)
    return (model.recurrent_bytes + convolved) // model.layers_of(LINEAR)


def _token_bytes(model: Model, kv_item: float) -> int:
    return int(2 * model.num_kv_heads * model.head_dim * kv_item)


def pool_of(
    model: Model, pool_bytes: int, *, context: int, depth: int, kv_item: float, mtp: bool, prefix_cache: bool = True
) -> Pool:
    """`depth` drafts a step; with MTP the head's attention layer joins the others."""
    attention = model.layers_of(FULL) + (model.mtp_layers if mtp else 0)
    recurrent, sliding = model.layers_of(LINEAR), model.layers_of(SLIDING)
    token_bytes = _token_bytes(model, kv_item)
    block = block_tokens(model, depth, kv_item)
    page = block * token_bytes
    state = _state_bytes(model, depth) if recurrent else 0
    kinds = [n for n in (attention, recurrent, sliding) if n]
    if not kinds:
        raise RequestError(f"{model.name} has no attention or recurrent layer; vLLM would allocate no pool for it.")
    per_group = max(kinds) if max(kinds) < CLOSE * min(kinds) else min(kinds)
    attention_groups, recurrent_groups, sliding_groups = (
        ceil(n / per_group) if n else 0 for n in (attention, recurrent, sliding)
    )
    full_blocks = ceil(context / block) * attention_groups
    # With prefix caching a sequence keeps the state before its newest block too.
    state_blocks = recurrent_groups * ((2 if prefix_cache else 1) + depth)
    window_blocks = sliding_groups * min(ceil(context / block), ceil(model.sliding_window / block) + 1)
    own_bytes = attention * token_bytes
    return Pool(
        block_tokens=block,
        page_bytes=page,
        layers_per_group=per_group,
        attention_groups=attention_groups + sliding_groups,
        recurrent_groups=recurrent_groups,
        blocks=max(0, pool_bytes // (page * per_group)),
        blocks_per_request=full_blocks + state_blocks + window_blocks,
        context=context,
        bytes_per_token=float(own_bytes),
        state_bytes=recurrent * state * (1 + depth),
    )
