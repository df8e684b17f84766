"""A prompt on the GPU's kernels in Triton's interpreter: against the model the CPU runs, and then steps go on."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.backends.family import Family
from stoker.backends.network.batch import Batch, Run
from stoker.backends.network.cache import Cache
from stoker.backends.network.decoder import Decoder
from stoker.errors import RequestError
from tests.backends.gpu.test_step import model, quantize

pytest.importorskip("triton")

PROMPT, AFTER = 75, [11, 42]  # one chunk of 64 and a tail; then a step of two tokens
# Relative to the CPU's logits. The interpreter rounds bf16 towards zero at a dozen places of a layer, the CPU to
# nearest: 0.007 to 0.015 results. A missing norm, gate, expert or token is ten times as far off.
LIMIT = 0.03


def test_a_prompt_and_a_step_match_the_model_however_the_prompt_is_cut(interpreter) -> None:
    interpreter(check_prompt)


def test_tokens_accepted_before_a_prompt_goes_on_are_part_of_it(interpreter) -> None:
    interpreter(check_replay)


def test_the_mtp_head_reads_a_prompt(interpreter) -> None:
    interpreter(check_mtp)


def test_what_does_not_fit_is_refused(interpreter) -> None:
    interpreter(check_messages)


def random_ids(count: int) -> Tensor:
    return torch.randint(0, 64, (count,), dtype=torch.int32)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def parts(decoder: Decoder, chunk: int = 128, snapshots: int = 0, **more: Any) -> tuple[Any, Any, Any, Tensor]:
    """Packed weights, a cache, a prefill over it and the pages of a sequence in slot 1."""
    from stoker.backends.gpu.kernels.deltanet import DeltaRing
    from stoker.backends.gpu.prefill import Prefill
    from stoker.backends.gpu.slots import SlotCache
    from stoker.backends.gpu.state import GpuCache
    from stoker.backends.gpu.weights import pack_decoder

    weights = pack_decoder(decoder, 256)
    cache = GpuCache.allocate(decoder.config, pages=4, slots=2, window=2, device="cpu")
    for state in cache.layers:
        if isinstance(state, DeltaRing):
            state.recurrent.normal_()  # what another sequence left
    table = torch.tensor([2, 0, 1, 3], dtype=torch.int32)
    kept = SlotCache(cache, weights, 2).snapshots(snapshots).kept()
    return weights, cache, Prefill(decoder.config, weights, cache, chunk, (0,), kept, **more), table


def step_logits(decoder: Decoder, weights: Any, cache: Any, table: Tensor, ids: list[int], cached: int) -> Tensor:
    """Of a step without anything to replay."""
    from stoker.backends.gpu.state import Bucket
    from stoker.backends.gpu.step import Step

    step = Step(decoder.config, weights, cache, Bucket(1, len(ids), 1), logits=True)
    step.inputs.tables.copy_(table[None])
    step.inputs.sequences.slots.fill_(1)
    step.inputs.sequences.cached.fill_(cached)
    step.inputs.token_ids.copy_(torch.tensor(ids))
    step.forward()
    assert step.buffers.best.logits is not None
    return step.buffers.best.logits.clone()


def check_prompt() -> None:
    """Weights of four formats; a prompt at once, in two chunks, and in company with a snapshot inside; then a step."""
    from stoker.backends.gpu.prefill import Part

    decoder = model()
    quantize(decoder)
    ids, other = random_ids(PROMPT), random_ids(30)
    left = []
    for cuts in ([PROMPT], [64, PROMPT - 64]):
        weights, cache, prefill, table = parts(decoder)
        streams, features, at = [], [], 0
        for count in cuts:
            prefill.forward(
                ids[at : at + count].contiguous(), [Part(1, at, count, table=table, chooses=at + count == PROMPT)]
            )
            streams.append(prefill.buffers.x[:count].clone())
            features.append(prefill.features[:count].clone())
            at += count
            if at == 64:
                half = _states(cache)
        assert int(prefill.tokens[0]) == int(prefill.logits[0].argmax())
        scored = prefill.logits_of(count - 3, count).clone()
        assert torch.equal(scored[2:], prefill.logits[:1])
        left.append((torch.cat(streams), torch.cat(features), scored, cache))
    whole, cut = left
    for index in range(3):
        assert torch.equal(whole[index], cut[index])
    _assert_same_caches(whole[3], cut[3])
    after = step_logits(decoder, weights, cut[3], table, AFTER, PROMPT)

    for recorded in (False, True):
        weights, cache, prefill, table = parts(decoder, snapshots=6, parts=3, copies=recorded)
        if recorded:  # rows that are not in use are computed too
            prefill.record(Replays())
        alone = table.new_tensor([1, 0, 0, 0])
        both = [
            Part(0, 0, 30, table=alone, chooses=True),
            Part(1, 0, PROMPT, [(64, 5)], table, chooses=True),
        ]
        prefill.forward(torch.cat([other, ids]), both)
        assert torch.equal(prefill.buffers.x[30 : 30 + PROMPT], whole[0])
        assert torch.equal(prefill.features[30 : 30 + PROMPT], whole[1])
        assert torch.equal(prefill.logits_of(30 + PROMPT - 3, 30 + PROMPT), whole[2])
        assert torch.equal(prefill.logits[1:2], whole[2][2:])
        assert int(prefill.tokens[1]) == int(prefill.logits[1].argmax())
        assert not torch.equal(prefill.logits[0], prefill.logits[1])
        _assert_same_caches(whole[3], cache, pages=table[:2].long())
        for layer, state in zip(prefill.kept, half, strict=True):
            assert torch.equal(layer.recurrent[5], state), "as if a chunk ended there"

    theirs = Cache.allocate(decoder.config, pages=2, slots=1, window=2)
    with torch.inference_mode():
        prompt = Batch.of(Family.PREFILL, [Run(ids.tolist(), 0, 0, [0, 1])], 64)
        hidden, tapped = decoder(prompt, theirs, taps=(0,))
        assert error(whole[1], tapped) < LIMIT
        assert error(whole[2], decoder.logits(hidden[-3:])) < LIMIT
        hidden, _ = decoder(Batch.of(Family.STEP, [Run(AFTER, PROMPT, 0, [0, 1])], 64), theirs)
        expected = decoder.logits(hidden)
    for row in range(2):
        assert error(after[row], expected[row]) < LIMIT, row


class Replays:
    """Stands for a recorder of graphs: what it records is made anew each time."""

    graphs = (None,)

    def record(self, body: Any) -> Any:
        self = Replays()
        self.body = body
        return self

    def __call__(self) -> None:
        self.body()


def _states(cache: Any) -> list[Tensor]:
    """Recurrent states of slot 1."""
    return [layer.recurrent[1].clone() for layer in cache.layers if hasattr(layer, "recurrent")]


def _assert_same_caches(first: Any, second: Any, pages: Any = slice(None)) -> None:
    for one, two in zip(first.layers, second.layers, strict=True):
        if hasattr(one, "keys"):
            assert torch.equal(one.keys[pages], two.keys[pages])
            assert torch.equal(one.values[pages], two.values[pages])
        else:
            assert torch.equal(one.recurrent[1], two.recurrent[1])


def check_replay() -> None:
    """A step of two tokens of which one is accepted, then more of the prompt: against the accepted tokens in a row."""
    from stoker.backends.gpu.prefill import Part
    from stoker.backends.gpu.slots import SlotCache

    decoder = model()
    ids = random_ids(14)
    weights, cache, prefill, table = parts(decoder)
    slots = SlotCache(cache, weights, 2)
    prefill.forward(ids[:9].contiguous(), [Part(1, 0, 9, table=table)])
    slots.holds(1, 9)
    step_logits(decoder, weights, cache, table, [int(ids[9]), 63], 9)
    slots.holds(1, 9)
    slots.settle_at(1, 10)
    prefill.forward(ids[10:].contiguous(), [Part(1, 10, 4, table=table, chooses=True)])
    found = prefill.logits[:1].clone()
    weights, cache, prefill, table = parts(decoder)
    prefill.forward(ids, [Part(1, 0, 14, table=table, chooses=True)])
    assert error(found, prefill.logits[:1]) < LIMIT
    without = prefill.logits[:1].clone()
    weights, cache, prefill, table = parts(decoder)
    prefill.forward(ids[[*range(9), *range(10, 14)]].contiguous(), [Part(1, 0, 13, table=table, chooses=True)])
    assert error(without, prefill.logits[:1]) > 5 * LIMIT, "a token left out would show"


def check_mtp() -> None:
    """Keys and stream of the head against the CPU's, fed with the same stream."""
    from stoker.backends.gpu.prefill import Part
    from stoker.backends.gpu.state import GpuCache
    from stoker.backends.network.cache import KVPages
    from stoker.weights.model_config import FULL

    decoder = model(mtp=True)
    assert decoder.mtp is not None
    ids = random_ids(7)
    _, _, prefill, table = parts(decoder, 64)
    (pages,) = GpuCache.allocate(decoder.config, pages=4, slots=1, window=1, device="cpu", kinds=[FULL]).layers
    assert isinstance(pages, KVPages)
    part = Part(1, 0, 6, table=table)
    prefill.forward(ids[:6].contiguous(), [part])
    stream, following = prefill.buffers.x[:6].clone(), ids[1:].contiguous()
    prefill.draft(following, pages)
    assert torch.equal(prefill.buffers.x[:6], stream), "the trunk's stream is left as it is"
    found, keys = prefill.buffers.normed[:6].clone(), pages.keys.clone()
    pages.keys.zero_()
    prefill.draft(following, pages, keys_only=True)
    assert torch.equal(pages.keys, keys)
    theirs = KVPages.allocate(1, decoder.config.num_kv_heads, decoder.config.head_dim, torch.bfloat16, "cpu")
    with torch.inference_mode():
        batch = Batch.of(Family.PREFILL, [Run(ids[:6].tolist(), 0, 0, [0])], 64)
        expected = decoder.mtp(batch, decoder.embed_tokens(following), decoder.norm(stream), theirs)
    assert error(found, expected) < LIMIT
    assert error(keys[2, :6], theirs.keys[0, :6]) < LIMIT


def check_messages() -> None:
    from stoker.backends.gpu.prefill import Part, Prefill

    decoder = model()
    weights, cache, prefill, table = parts(decoder)
    with pytest.raises(RequestError, match=re.escape("a chunk has 1 to 128 tokens, found 129.")):
        prefill.forward(random_ids(129), [Part(1, 0, 129, table=table)])
    with pytest.raises(RequestError, match=re.escape("250 + 7 tokens do not fit the 256 places of 4 pages.")):
        prefill.forward(random_ids(7), [Part(1, 250, 7, table=table)])
    with pytest.raises(ValueError, match=re.escape("7 tokens were given for 2 parts of [3, 3].")):
        prefill.forward(random_ids(7), [Part(1, 0, 3, table=table), Part(0, 0, 3, table=table)])
    with pytest.raises(ValueError, match="a chunk has a multiple of 64 tokens up to 65,536, not 100"):
        Prefill(decoder.config, weights, cache, 100)
