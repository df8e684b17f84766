"""The decode benchmark's loop on the device: which drafts are kept and what the next step starts from, in Triton's
interpreter."""

import pytest
import torch

from tests.backends.gpu.test_dflash import config, network
from tests.backends.gpu.test_step import model

pytest.importorskip("triton")


def test_drafts_are_kept_up_to_the_first_wrong_one(interpreter) -> None:
    interpreter(check_counts)


def test_the_next_step_starts_from_what_was_kept(interpreter) -> None:
    interpreter(check_inputs)


def test_kernels_name_what_is_wrong(interpreter) -> None:
    interpreter(check_messages)


def test_agreeing_drafts_are_kept_and_the_next_step_starts_behind_them(interpreter) -> None:
    interpreter(check_accept)


def test_depths_a_block_has_no_room_for_are_refused(interpreter) -> None:
    interpreter(check_depth)


def numbers(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def check_counts() -> None:
    from benchmarks.gpu.accept_kernels import accept_drafts

    ids = numbers([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 9, 3, 4, 5])
    chosen = numbers([2, 3, 4, 5, 6], [2, 3, 4, 7, 8], [9, 3, 4, 5, 6], [2, 3, 4, 5, 6])
    counts, tokens, last = torch.zeros(4, dtype=torch.int32), torch.zeros_like(ids), torch.zeros(4, dtype=torch.int64)
    accept_drafts(ids, chosen, counts, tokens, last, None)
    assert counts.tolist() == [5, 4, 1, 1], "what is right behind a wrong draft does not count"
    assert last.tolist() == [4, 8, 10, 15]
    assert torch.equal(tokens, chosen)
    accept_drafts(ids, chosen, counts, tokens, last, numbers([2, 3, 4, 5])[0])
    assert counts.tolist() == [2, 3, 4, 5]
    assert last.tolist() == [1, 7, 13, 19]
    one = numbers([7], [8])
    accept_drafts(one, one + 1, counts[:2], tokens[:2, :1].clone(), last[:2], None)
    assert counts[:2].tolist() == [1, 1], "without drafts there is the choice alone"


def check_inputs() -> None:
    from benchmarks.gpu.accept_kernels import advance_inputs

    counts, tokens = numbers([2, 3])[0], numbers([8, 5, 6], [2, 3, 4])
    ids, cached, replay = torch.zeros(2, 3, dtype=torch.int32), numbers([10, 20])[0], numbers([9, 9])[0]
    advance_inputs(counts, tokens, numbers([30, 40], [31, 41]).t(), ids, cached, replay)
    assert ids.tolist() == [[5, 30, 31], [4, 40, 41]]
    assert cached.tolist() == [12, 23]
    assert replay.tolist() == [2, 3]
    advance_inputs(counts, tokens, None, ids, cached, replay)
    assert ids.tolist() == [[5, 30, 31], [4, 40, 41]]
    assert cached.tolist() == [14, 26]


def check_messages() -> None:
    from benchmarks.gpu.accept_kernels import accept_drafts, advance_inputs

    ids, counts = numbers([1, 2], [3, 4]), numbers([1, 1])[0]
    with pytest.raises(ValueError, match=r"last_rows must be torch.int64, found torch.int32"):
        accept_drafts(ids, ids, counts, ids, counts, None)
    with pytest.raises(ValueError, match=r"drafts must be \[2, 1\] int32, found \[2, 2\]"):
        advance_inputs(counts, ids, ids, ids, counts, counts)


def check_accept() -> None:
    from benchmarks.gpu.device_loop import Accepted, accept, advance

    from stoker.backends.gpu.state import Bucket, GpuCache
    from stoker.backends.gpu.step import Step
    from stoker.backends.gpu.weights import pack_decoder

    decoder = model()
    cache = GpuCache.allocate(decoder.config, pages=8, slots=2, window=3, device="cpu")
    step = Step(decoder.config, pack_decoder(decoder, 64), cache, Bucket(2, 3, 1))
    step.inputs.token_ids.copy_(torch.tensor([7, 8, 9, 1, 2, 3]))  # newest, draft, draft of each
    step.buffers.tokens.copy_(torch.tensor([8, 5, 6, 2, 3, 4]))  # the first draft agrees; both agree
    step.inputs.sequences.cached.copy_(torch.tensor([10, 20]))
    accepted = Accepted.allocate(step)
    accept(step, accepted)
    assert accepted.counts.tolist() == [2, 3]
    assert accepted.tokens.tolist() == [[8, 5, 6], [2, 3, 4]]
    assert accepted.last_rows.tolist() == [1, 5]
    advance(step, accepted, torch.tensor([[30, 31], [40, 41]], dtype=torch.int32))
    assert step.inputs.token_ids.tolist() == [5, 30, 31, 4, 40, 41]
    assert step.inputs.sequences.cached.tolist() == [12, 23]
    assert step.inputs.sequences.replay.tolist() == [2, 3]
    accept(step, accepted, torch.tensor([1, 2], dtype=torch.int32))
    assert accepted.counts.tolist() == [1, 2], "assumed acceptance is taken as it is"
    assert accepted.last_rows.tolist() == [0, 4]
    drafts = torch.tensor([[60, 70], [61, 71]], dtype=torch.int32).t()  # as a MTP head leaves them: depth first
    advance(step, accepted, drafts)
    assert step.inputs.token_ids.tolist() == [8, 60, 61, 3, 70, 71]
    with pytest.raises(ValueError, match=r"drafts must be \[2, 2\] int32, found \[2, 1\]"):
        advance(step, accepted, drafts[:, :1])


def check_depth() -> None:
    from benchmarks.gpu.device_loop import DFlashDraft

    from stoker.backends.gpu.dflash import pack_dflash
    from stoker.backends.gpu.state import Bucket, GpuCache
    from stoker.backends.gpu.step import Step
    from stoker.backends.gpu.weights import pack_decoder

    decoder = model()
    cache = GpuCache.allocate(decoder.config, pages=4, slots=1, window=5, device="cpu")
    step = Step(decoder.config, pack_decoder(decoder, 64), cache, Bucket(1, 5, 1), taps=(0, 1))
    with pytest.raises(ValueError, match="a block of 4 drafts 1 to 3 tokens, not 4"):
        DFlashDraft(step, config(), pack_dflash(network(), 64), 4, 4)
