"""The likeliest token of each row of logits, and how likely it is."""

from torch import Tensor

from stoker.backends.cpu.ops.dispatch import operation


@operation
def best_tokens(scores: Tensor) -> Tensor:
    """Where each row of scores [R, vocab] is largest, [R]; the lowest id where several are."""
    return scores.argmax(-1)


@operation
def probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of one token [R] for each row of logits [R, vocab], [R]."""
    return (logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)).exp()
