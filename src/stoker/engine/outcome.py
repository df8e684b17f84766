"""What the model's choices in a step mean for its requests: tokens accepted and emitted, and what is counted."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from stoker.engine.backend import SCORED_ROWS, Choices
from stoker.engine.event import Event, Finish, TokenLogprob
from stoker.engine.request import Request
from stoker.engine.step import StepTokens
from stoker.sampling.sampler import score
from stoker.speculate.drafter import accept

Emitted = list[tuple[Request, Event]]


def settle(entries: Sequence[StepTokens], choices: Choices) -> tuple[Emitted, list[int]]:
    """Events of the entries that verify, and how many tokens of each entry are kept."""
    emitted: Emitted = []
    kept: list[int] = []
    for entry, first in zip(entries, choices.firsts, strict=True):
        request, count = entry.request, len(entry.known)
        if request.slot < 0:  # cancelled while the step was computed
            count = 0
        elif entry.verifies:
            targets = choices.tokens[first : first + len(entry.drafts) + 1]
            assumed = None
            if request.assumed is None:
                tokens = accept(entry.drafts, targets)
            else:
                assumed = request.assumed.accept(len(entry.drafts))
                tokens = [*entry.drafts[:assumed], targets[assumed]]
            event = emit(request, tokens, choices.logits, first)
            if entry.drafts:
                event = replace(event, drafts=tuple(entry.drafts), forced=entry.forced, assumed=assumed)
            emitted.append((request, event))
            count = len(event.tokens)  # a stop among them cuts it short
            _count(entry, right=min(count, len(tokens) - 1))
        else:
            request.stats.replayed_tokens += count
        kept.append(count)
        if count:
            request.computed += count
            request.replay = count
    return emitted, kept


def emit(request: Request, tokens: list[int], logits: Tensor, first: int) -> Event:
    """Adds tokens, one after another until one ends the request. Row first + i of logits [R, vocab] made token i."""
    top, found, count = request.sampling.logprobs, [], 0
    finish, error, damaged = None, None, False
    while count < len(tokens) and finish is None:
        token = tokens[count]
        if logits.is_cpu and not _is_finite(logits[first + count], token, whole=not request.output):
            request.output.append(token)  # there is a token after each computed one, and nobody is told of this
            finish, damaged = Finish.ERROR, True
            error = (
                f"the model's logits are not finite at token {len(request.output)} of the answer: its weights hold "
                "NaN or Inf, or make numbers too large for their format. stoker inspect --verify finds the former."
            )
            break
        if top is not None:
            (scored,) = score(logits[first + count : first + count + 1], [token], top)
            found.append(TokenLogprob(token, *scored))
        count += 1
        try:
            request.push(token)
        except KeyboardInterrupt:
            raise
        except BaseException as failure:  # a panic of the tokenizer's library is no Exception
            finish = Finish.ERROR
            error = f"token {token} cannot be turned into text: {type(failure).__name__}: {failure}"
        else:
            finish = request.finish_after(token)
    stop = request.text.stopped if request.text else None
    prompt: tuple[TokenLogprob, ...] = ()
    if request.prompt_logprobs:
        prompt = tuple(request.prompt_logprobs[place] for place in sorted(request.prompt_logprobs))
        request.prompt_logprobs = {}
    return Event(
        request.id,
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
    return math.isfinite(float(logits.sum() if whole else logits[token]))


def score_prompt(request: Request, count: int, logits: Callable[[int, int], Tensor]) -> None:
    """Log-probabilities of the prompt tokens after each of the next `count`. logits(start, stop) are those of rows of
    the chunk, [stop - start, vocab] or more."""
    top, begin = request.sampling.prompt_logprobs, request.computed + 1
    assert top is not None
    tokens = request.prompt[begin : begin + count]
    for start in range(0, len(tokens), SCORED_ROWS):
        some = tokens[start : start + SCORED_ROWS]
        rows = logits(start, start + len(some))
        # always as many rows, so that where a prompt is cut changes no digit
        rows = pad(rows, (0, 0, 0, SCORED_ROWS - len(rows)))
        scores = score(rows, some + [0] * (SCORED_ROWS - len(some)), top)
        for place, (token, scored) in enumerate(zip(some, scores, strict=False)):
            request.prompt_logprobs[begin + start + place] = TokenLogprob(token, *scored)


def following(requests: Sequence[Request], kept: Sequence[int]) -> list[list[int]]:
    """The tokens after the last kept[i] computed ones of each request, all of them known by now."""
    return [
        request.tokens[request.computed - count + 1 : request.computed + 1]
        for request, count in zip(requests, kept, strict=True)
    ]


def _count(entry: StepTokens, right: int) -> None:
    stats = entry.request.stats
    stats.steps += 1
    if entry.forced:
        stats.forced += right
    else:
        stats.count_drafts(len(entry.drafts), right)
