"""What the model's choices in a step mean for its requests: tokens accepted and emitted, and what is counted."""

import math
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from stoker.engine.block import Block
from stoker.engine.request import Event, Finish, Sequence, TokenLogprob
from stoker.sampling.sampler import score
from stoker.speculate.drafter import accept

Emitted = list[tuple[Sequence, Event]]
SCORED_ROWS = 16  # of a prompt whose logits are held at a time: they are large


def settle(blocks: Many[Block], targets: Many[int], logits: Tensor, firsts: Many[int]) -> tuple[Emitted, list[int]]:
    """Events of the blocks that verify, and how many tokens of each block are kept.

    Block i has its rows from firsts[i] on, in `targets`, the model's choice after each row, as in `logits` [R, vocab].
    """
    emitted: Emitted = []
    kept: list[int] = []
    for block, first in zip(blocks, firsts, strict=True):
        sequence, count = block.sequence, len(block.known)
        if block.verifies:
            tokens = accept(block.drafts, targets[first : first + len(block.drafts) + 1])
            event = emit(sequence, tokens, logits, first)
            if block.drafts:
                event = replace(event, drafts=tuple(block.drafts), forced=block.forced)
            emitted.append((sequence, event))
            count = len(event.tokens)  # a stop inside the block cuts it short
            _count(block, right=min(count, len(tokens) - 1))
        else:
            sequence.stats.replayed_tokens += count
        sequence.computed += count
        sequence.replay = count
        kept.append(count)
    return emitted, kept


def emit(sequence: Sequence, tokens: list[int], logits: Tensor, first: int) -> Event:
    """Adds tokens, one after another until one ends the request. Row first + i of logits [R, vocab] made token i."""
    top, found, count = sequence.sampling.logprobs, [], 0
    finish, error, damaged = None, None, False
    while count < len(tokens) and finish is None:
        token = tokens[count]
        if not _is_finite(logits[first + count], token, whole=not sequence.output):
            sequence.output.append(token)  # there is a token after each computed one, and nobody is told of this
            finish, damaged = Finish.ERROR, True
            error = (
                f"the model's logits are not finite at token {len(sequence.output)} of the answer: its weights hold "
                "NaN or Inf, or make numbers too large for their format. stoker inspect --verify finds the former."
            )
            break
        if top is not None:
            (scored,) = score(logits[first + count : first + count + 1], [token], top)
            found.append(TokenLogprob(token, *scored))
        count += 1
        try:
            sequence.push(token)
        except KeyboardInterrupt:
            raise
        except BaseException as failure:  # a panic of the tokenizer's library is no Exception
            finish = Finish.ERROR
            error = f"token {token} cannot be turned into text: {type(failure).__name__}: {failure}"
        else:
            finish = sequence.finish_after(token)
    stop = sequence.text.stopped if sequence.text else None
    prompt = tuple(sequence.prompt_logprobs[place] for place in sorted(sequence.prompt_logprobs))
    sequence.prompt_logprobs = {}
    return Event(
        sequence.id,
        tuple(tokens[:count]),
        finish,
        logprobs=tuple(found),
        prompt_logprobs=prompt,
        stop=stop,
        error=error,
        damaged=damaged,
    )


def _is_finite(logits: Tensor, token: int, whole: bool) -> bool:
    """Of one row [vocab] the chosen token's logit, or all of them. On accelerators, where to look is to wait, only the
    server's self-test looks."""
    if not logits.is_cpu:
        return True
    return math.isfinite(float(logits.sum() if whole else logits[token]))


def score_prompt(sequence: Sequence, count: int, logits: Callable[[int, int], Tensor]) -> None:
    """Log-probabilities of the prompt tokens after each of the next `count`. logits(start, stop) are those of rows of
    the chunk, [stop - start, vocab] or more."""
    top, begin = sequence.sampling.prompt_logprobs, sequence.computed + 1
    assert top is not None
    tokens = sequence.prompt[begin : begin + count]
    for start in range(0, len(tokens), SCORED_ROWS):
        some = tokens[start : start + SCORED_ROWS]
        rows = logits(start, start + len(some))
        # always as many rows, so that where a prompt is cut changes no digit
        rows = pad(rows, (0, 0, 0, SCORED_ROWS - len(rows)))
        scores = score(rows, some + [0] * (SCORED_ROWS - len(some)), top)
        for place, (token, scored) in enumerate(zip(some, scores, strict=False)):
            sequence.prompt_logprobs[begin + start + place] = TokenLogprob(token, *scored)


def following(members: Many[Sequence], kept: Many[int]) -> list[int]:
    """The token after each of the last kept[i] computed ones of each request, all of them known by now."""
    return [
        token
        for sequence, count in zip(members, kept, strict=True)
        for token in sequence.tokens[sequence.computed - count + 1 : sequence.computed + 1]
    ]


def _count(block: Block, right: int) -> None:
    stats = block.sequence.stats
    stats.steps += 1
    if block.forced:
        stats.forced += right
    else:
        stats.count_drafts(len(block.drafts), right)
