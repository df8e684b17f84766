"""Switches the compiled kernels on, where Numba is installed and they hold: a row's bits do not depend on other rows.

They are compiled when first checked, which takes seconds, and once per machine.
"""

import platform
from collections.abc import Callable
from functools import lru_cache
from types import NotImplementedType
from typing import TypeVar

import torch
from torch import Tensor

from stoker.backends.cpu.ops.attention import QueryTiles
from stoker.backends.cpu.ops.deltanet import DeltaConstants, DeltaState, Replay, SerialPlan
from stoker.backends.cpu.ops.dispatch import KERNELS, REFERENCES_ONLY, register
from stoker.backends.family import STEP_TILE
from stoker.errors import EngineError
from stoker.weights.formats.int4 import Int4

R = TypeVar("R")
TOKENS = 2 * STEP_TILE  # of the trials
SIZE = 128  # of a head, an expert, a hidden state


@lru_cache
def compiled_kernels() -> bool:
    """Whether they are there; the first call registers them."""
    if REFERENCES_ONLY:
        return False
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    try:
        held = _fuses() and _rows_hold() and _experts_hold() and _attention_holds() and _delta_holds()
    except OSError as error:  # without them the numbers would be others than at the last start: no silent way out
        raise EngineError(
            f"the compiled kernels could not be kept: {error}. "
            "Make room there, or let XDG_CACHE_HOME name another folder."
        ) from error
    if not held:
        return False
    from stoker.backends.cpu.kernels import attend, delta, rows

    kernels: list[Callable[..., object]] = [rows.scaled_rms_norm, rows.small_product, rows.route]
    kernels += [rows.best_tokens, rows.probabilities]
    for kernel in [*kernels, attend.head_norm_rope, attend.gated_attention, delta.gated_delta, delta.commit]:
        register(kernel.__name__, kernel, "cpu")
    return True


def in_use() -> bool:
    """Whether a model has switched them on."""
    return "gated_delta" in KERNELS["cpu"]


def _fuses() -> bool:
    """Whether the processor multiplies and adds in one go; else every such step would be a call of a function."""
    from llvmlite import binding

    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return not x86 or bool(binding.get_host_cpu_features().get("fma", False))


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _alone(function: Callable[[slice], Tensor]) -> bool:
    """Whether rows computed one by one are those computed together."""
    one_by_one = [function(slice(t, t + 1)) for t in range(TOKENS)]
    return torch.equal(torch.cat(one_by_one), function(slice(0, TOKENS)))


def _taken(result: R | NotImplementedType) -> R:
    """What a kernel gave; the trials are such as each must take."""
    assert not isinstance(result, NotImplementedType)
    return result


def _rows_hold() -> bool:
    from stoker.backends.cpu.kernels import rows

    x, scale, weight, logits = (
        _random(TOKENS, SIZE).bfloat16(),
        _random(2 * SIZE),
        _random(SIZE, 32),
        _random(TOKENS, 9),
    )
    return (
        _alone(lambda part: _taken(rows.scaled_rms_norm(x[part], scale, 1e-6)))
        and _alone(lambda part: rows.small_product(x[part], weight))
        and _alone(lambda part: _taken(rows.best_tokens(logits[part])))
        and _alone(lambda part: _taken(rows.probabilities(logits[part], torch.zeros(TOKENS, dtype=torch.long)[part])))
        and _alone(lambda part: torch.cat([x.float() for x in _taken(rows.route(logits[part], 3, True))], dim=1))
    )


def _experts_hold() -> bool:
    from stoker.backends.cpu.kernels.experts import StepExperts

    count = 4
    gate_up, down = Int4.quantize(_random(count, 2 * SIZE, SIZE)), Int4.quantize(_random(count, SIZE, SIZE))
    gate, up, result = (_random(SIZE, SIZE).bfloat16() for _ in range(3))
    experts = StepExperts.of([gate_up], [down], (gate, up, result))
    assert experts is not None
    x, weights, gate = _random(TOKENS, SIZE).bfloat16(), _random(TOKENS, 2), _random(TOKENS, 1)
    chosen = torch.stack([torch.arange(TOKENS) % count, (torch.arange(TOKENS) + 1) % count], dim=1)
    return _alone(lambda part: experts(x[part], chosen[part], weights[part], gate[part]))


def _attention_holds() -> bool:
    from stoker.backends.cpu.kernels import attend

    heads, kv_heads, page_size, pages = 4, 2, 64, 3
    q, k = _random(TOKENS, heads, SIZE).bfloat16(), _random(TOKENS, kv_heads, SIZE).bfloat16()
    scales, angles = _random(heads + kv_heads, SIZE), _random(TOKENS, 16)
    keys = _random(pages, page_size, kv_heads, SIZE).bfloat16()
    values = keys.flip(3).contiguous()
    coded, steps = keys.to(torch.float8_e4m3fn), _random(pages, page_size, kv_heads).abs().bfloat16()
    last = torch.arange(TOKENS) * 11 + 3

    def tiles(part: slice) -> QueryTiles:
        count = part.stop - part.start
        rows = torch.arange(-(-count // STEP_TILE) * STEP_TILE).view(-1, STEP_TILE).clamp(max=count)
        ends = torch.cat([last[part], last.new_full((1,), -1)])[rows]
        tables = torch.tensor([[2, 0, 1]]).expand(len(rows), -1).contiguous()
        return QueryTiles(rows, torch.zeros_like(rows), ends, tables, page_size)

    def rotated(part: slice, which: int) -> Tensor:
        return _taken(attend.head_norm_rope(q[part], k[part], scales, 1e-6, angles[part].cos(), angles[part].sin()))[
            which
        ]

    return (
        _alone(lambda part: rotated(part, 0))
        and _alone(lambda part: rotated(part, 1))
        and _alone(lambda part: _taken(attend.gated_attention(q[part], q[part], keys, values, tiles(part))))
        and _alone(lambda part: _taken(attend.gated_attention(q[part], None, coded, coded, tiles(part), steps, steps)))
    )


def _delta_holds() -> bool:
    """The same tokens one by one and in blocks, from a state that is not zero, and what they leave behind."""
    from stoker.backends.cpu.kernels import delta

    key_heads, heads, window = 1, 2, 8
    channels, fed = (2 * key_heads + heads) * SIZE, 2 * key_heads * SIZE + heads * (SIZE + 2)
    constants = DeltaConstants(-_random(heads).abs(), _random(2 * heads), _random(4, channels), _random(SIZE), 1e-6)
    qkv, z = _random(TOKENS, channels).bfloat16(), _random(TOKENS, heads * SIZE).bfloat16()
    gates = _random(TOKENS, 2 * heads)

    def run(cuts: list[int]) -> tuple[Tensor, Tensor]:
        ring = window + len(constants.conv) - 1
        state = DeltaState(
            _random(1, heads, SIZE, SIZE), torch.zeros(1, ring, channels).bfloat16(), torch.zeros(1, ring, fed)
        )
        found, position, pending = [], 0, 0
        for count in cuts:
            rows = slice(position, position + count)
            replay = Replay(torch.tensor([[0, 0, position - pending, position]]))
            plan = SerialPlan(replay, torch.tensor([[0, position, count]]))
            found.append(_taken(delta.gated_delta(qkv[rows], z[rows], gates[rows], constants, state, plan)))
            position, pending = position + count, count
        delta.commit(state, Replay(torch.tensor([[0, 0, position - pending, position]])))
        return torch.cat(found), state.recurrent

    expected = run([1] * TOKENS)
    return all(
        torch.equal(mine, his) for cuts in ([8, 8], [3, 5, 1, 7]) for mine, his in zip(run(cuts), expected, strict=True)
    )
