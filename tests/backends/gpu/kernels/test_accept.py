"""Which drafts are kept and what the next step starts from, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")


def test_drafts_are_kept_up_to_the_first_wrong_one(interpreter) -> None:
    interpreter(check_counts)


def test_the_next_step_starts_from_what_was_kept(interpreter) -> None:
    interpreter(check_inputs)


def test_kernels_name_what_is_wrong(interpreter) -> None:
    interpreter(check_messages)


def numbers(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def check_counts() -> None:
    from stoker.backends.gpu.kernels.accept import accept_drafts

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
    from stoker.backends.gpu.kernels.accept import advance_inputs

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
    from stoker.backends.gpu.kernels.accept import accept_drafts, advance_inputs

    ids, counts = numbers([1, 2], [3, 4]), numbers([1, 1])[0]
    with pytest.raises(ValueError, match=r"last_rows must be torch.int64, found torch.int32"):
        accept_drafts(ids, ids, counts, ids, counts, None)
    with pytest.raises(ValueError, match=r"drafts must be \[2, 1\] int32, found \[2, 2\]"):
        advance_inputs(counts, ids, ids, ids, counts, counts)
