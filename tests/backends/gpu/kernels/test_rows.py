"""What begins a forward, in Triton's interpreter: the embedding and the MTP head's inputs."""

import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

HIDDEN, VOCAB, EPS = 96, 20, 1e-6
BF16_STEP = 2.0**-7  # the interpreter rounds towards zero


def test_stream_begins_with_the_embedding(interpreter) -> None:
    interpreter(check_begin)


def test_mtp_inputs_are_the_two_norms_side_by_side(interpreter) -> None:
    interpreter(check_mtp_inputs)


def test_kernels_name_what_is_wrong(interpreter) -> None:
    interpreter(check_messages)


def normed(x: Tensor, scale: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * scale


def check_begin() -> None:
    from stoker.backends.gpu.kernels.linear import Stream
    from stoker.backends.gpu.kernels.rows import begin

    ids, table = torch.tensor([3, 19, 3], dtype=torch.int32), torch.randn(VOCAB, HIDDEN).bfloat16()
    stream = Stream(torch.empty(3, HIDDEN).bfloat16(), torch.rand(HIDDEN), torch.empty(3, HIDDEN).bfloat16())
    squares = torch.empty(3, HIDDEN // 16)
    begin(stream, squares, ids, table)
    assert torch.equal(stream.x, table[ids.long()])
    torch.testing.assert_close(stream.scaled.float(), stream.x.float() * stream.next_scale, rtol=BF16_STEP, atol=1e-6)
    torch.testing.assert_close(squares.sum(1), stream.x.float().square().sum(1))
    before = squares.clone()
    begin(stream, squares, None, None)  # as it stands
    assert torch.equal(squares, before)


def check_mtp_inputs() -> None:
    from stoker.backends.gpu.kernels.rows import MtpNorms, mtp_inputs

    ids, table = torch.tensor([3, 19], dtype=torch.int32), torch.randn(VOCAB, HIDDEN).bfloat16()
    x, joined = torch.randn(2, HIDDEN).bfloat16() * 4, torch.empty(2, 2 * HIDDEN).bfloat16()
    norms = MtpNorms(torch.rand(HIDDEN) + 0.5, torch.rand(HIDDEN) + 0.5, torch.rand(HIDDEN) + 0.5, EPS)
    mtp_inputs(ids, table, x, norms, joined)
    embedded, hidden = joined.float().chunk(2, dim=1)
    torch.testing.assert_close(embedded, normed(table[ids.long()].float(), norms.embedding), rtol=BF16_STEP, atol=1e-5)
    expected = normed(normed(x.float(), norms.last), norms.hidden)
    torch.testing.assert_close(hidden, expected, rtol=2 * BF16_STEP, atol=1e-5)


def check_messages() -> None:
    from stoker.backends.gpu.kernels.linear import Stream
    from stoker.backends.gpu.kernels.rows import begin

    stream = Stream(torch.empty(3, HIDDEN).bfloat16(), torch.rand(HIDDEN), torch.empty(3, HIDDEN).bfloat16())
    ids, squares = torch.zeros(3, dtype=torch.int32), torch.empty(3, HIDDEN // 16)
    wrong = [
        (lambda: begin(stream, squares, ids, None), "ids and table belong together: give both or none."),
        (lambda: begin(stream, squares[:2], None, None), "squares must be [3, 6], found [2, 6]."),
        (
            lambda: begin(stream, squares, ids.long(), torch.zeros(VOCAB, HIDDEN).bfloat16()),
            "ids must be torch.int32, found torch.int64.",
        ),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
