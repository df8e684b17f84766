"""Routing and experts of a step, in Triton's interpreter: against fp64, and bit for bit whatever rides along."""

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from stoker.backends.gpu.packed import Kind, PackedWeight
from stoker.backends.network.experts import route as route_reference
from tests.backends.gpu.test_packed import packed

pytest.importorskip("triton")

EXPERTS, HIDDEN, INTER, TOP_K, EPS = 6, 128, 128, 2, 1e-6


@dataclass
class Layer:
    router: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    shared_gate_up: PackedWeight
    shared_down: PackedWeight
    scale: Tensor
    next_scale: Tensor

    @classmethod
    def random(cls, kind: Kind, shared: Kind, experts: int = EXPERTS) -> "Layer":
        return cls(
            packed(Kind.BF16, experts + 1, HIDDEN)[0],
            packed(kind, experts, 2 * INTER, HIDDEN)[0],
            packed(kind, experts, HIDDEN, INTER)[0],
            packed(shared, 2 * INTER, HIDDEN)[0],
            packed(shared, HIDDEN, INTER)[0],
            torch.rand(HIDDEN) + 0.5,
            torch.rand(HIDDEN) + 0.5,
        )


@pytest.mark.parametrize("tokens", [1, 5, 16, 20])
def test_router_chooses_as_the_reference(interpreter, tokens: int) -> None:
    interpreter(check_route, tokens)


@pytest.mark.parametrize("tokens", [6, 18])
def test_rows_that_pad_a_batch_choose_no_expert(interpreter, tokens: int) -> None:
    interpreter(check_padding, tokens)


def test_router_without_renormalising(interpreter) -> None:
    interpreter(check_probabilities)


@pytest.mark.parametrize(
    ("kind", "shared", "tokens"),
    [
        (Kind.INT4, Kind.BF16, 1),
        (Kind.INT4, Kind.FP8, 3),
        (Kind.NVFP4, Kind.INT8, 1),
        (Kind.FP8, Kind.NVFP4, 1),
    ],
)
def test_layer_matches_fp64(interpreter, kind: Kind, shared: Kind, tokens: int) -> None:
    interpreter(check_layer, kind, shared, tokens)


def test_a_token_does_not_depend_on_its_company(interpreter) -> None:
    interpreter(check_rows)


def test_kernels_name_what_is_wrong(interpreter) -> None:
    interpreter(check_messages)


def routed(
    layer: Layer, x: Tensor, top_k: int = TOP_K, renormalize: bool = True, sequences: Any = None
) -> tuple[Any, Tensor, Any]:
    """-> routing, x times the norm's weight, workspace"""
    from stoker.backends.gpu.kernels.launch import Workspace
    from stoker.backends.gpu.kernels.route import Routing, route

    scaled = (x.float() * layer.scale).bfloat16()
    routing = Routing.allocate(x.shape[0], top_k, "cpu")
    space = Workspace.allocate(6 * 64 * x.shape[0], 64, "cpu")
    route(x, scaled, layer.router, routing, space, eps=EPS, renormalize=renormalize, shared=True, sequences=sequences)
    assert not space.counters.any()
    return routing, scaled, space


def normed(x: Tensor, scaled: Tensor) -> Tensor:
    return scaled.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()


def check_route(tokens: int) -> None:
    layer = Layer.random(Kind.BF16, Kind.BF16, experts=24)
    x = torch.randn(tokens, HIDDEN).bfloat16()
    routing, scaled, _ = routed(layer, x, top_k=3)
    logits = normed(x, scaled) @ layer.router.dequantize().double().t()
    experts, weights = route_reference(logits[:, :24].float(), 3, True)
    assert torch.equal(routing.experts.long(), experts)
    torch.testing.assert_close(routing.weights, weights)
    torch.testing.assert_close(routing.shared, torch.sigmoid(logits[:, 24]).float())
    if tokens == 1:
        assert int(routing.tile_count) == 3
        return
    flat, held = routing.experts.flatten().tolist(), []
    for expert, pairs in zip(routing.tile_expert.tolist(), routing.tile_pairs.tolist(), strict=True):
        pairs = [pair for pair in pairs if pair >= 0]
        assert (expert < 0) == (not pairs)
        assert all(flat[pair] == expert for pair in pairs)
        held += pairs
    assert sorted(held) == list(range(tokens * 3)), "every pair is in one tile"
    needed = sum(-(-flat.count(expert) // 8) for expert in set(flat))
    assert int(routing.tile_count) == int((routing.tile_expert >= 0).sum()) == needed, "no more tiles than needed"


def check_padding(tokens: int) -> None:
    """Three sequences, of which one has a single token and one none; the first's stay as they are."""
    from stoker.backends.gpu.kernels.deltanet import Sequences
    from stoker.backends.gpu.kernels.experts import ExpertBuffers, experts
    from stoker.backends.gpu.kernels.linear import Stream

    layer, rows = Layer.random(Kind.INT4, Kind.BF16), tokens // 3
    x = torch.randn(tokens, HIDDEN).bfloat16()
    zero = torch.zeros(3, dtype=torch.int32)
    sequences = Sequences(rows, zero, zero, torch.tensor([rows, 1, 0], dtype=torch.int32), zero)
    stream = x.clone()
    routing, scaled, space = routed(layer, stream, sequences=sequences)
    whole, _, _ = routed(layer, x)
    real = rows + 1
    assert torch.equal(routing.experts[:real], whole.experts[:real])
    assert torch.equal(routing.weights[:real], whole.weights[:real])
    assert (routing.experts[real:] == -1).all()
    held = [pair for pairs in routing.tile_pairs.tolist() for pair in pairs if pair >= 0]
    assert sorted(held) == list(range(real * TOP_K)), "pairs of real rows alone are in tiles"
    assert int(routing.tile_count) == int((routing.tile_expert >= 0).sum())
    buffers, squares = ExpertBuffers.allocate(tokens, TOP_K, INTER, HIDDEN, "cpu"), torch.zeros(tokens, HIDDEN // 16)
    experts(
        Stream(stream, layer.next_scale, scaled), routing, layer.gate_up, layer.down, layer.shared_gate_up,
        layer.shared_down, buffers, squares, space, layer.next_scale, eps=EPS,
    )  # fmt: skip
    assert not space.counters.any()
    assert torch.equal(stream[:real], run_experts(layer, x[:real])[0])


def check_probabilities() -> None:
    layer = Layer.random(Kind.BF16, Kind.BF16)
    x = torch.randn(3, HIDDEN).bfloat16()
    routing, scaled, _ = routed(layer, x, renormalize=False)
    logits = normed(x, scaled) @ layer.router.dequantize().double().t()
    _, weights = route_reference(logits[:, :EXPERTS].float(), TOP_K, False)
    torch.testing.assert_close(routing.weights, weights)


def run_experts(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-> the stream after the layer, times the next norm's weight, and its squares"""
    from stoker.backends.gpu.kernels.experts import ExpertBuffers, experts
    from stoker.backends.gpu.kernels.linear import Stream

    tokens, x = x.shape[0], x.clone()
    routing, scaled, space = routed(layer, x)
    buffers = ExpertBuffers.allocate(tokens, TOP_K, INTER, HIDDEN, "cpu")
    squares = torch.full((tokens, HIDDEN // 16), torch.nan)
    experts(
        Stream(x, layer.next_scale, scaled), routing, layer.gate_up, layer.down, layer.shared_gate_up,
        layer.shared_down, buffers, squares, space, layer.next_scale, eps=EPS,
    )  # fmt: skip
    assert not space.counters.any()
    return x, scaled, squares


def check_layer(kind: Kind, shared: Kind, tokens: int) -> None:
    layer = Layer.random(kind, shared)
    x = torch.randn(tokens, HIDDEN).bfloat16()
    routing, scaled, _ = routed(layer, x)
    inputs = normed(x, scaled)

    def mlp(row: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (gate_up.double() @ row).chunk(2)
        return down.double() @ (silu(gate) * up)

    added = torch.zeros(tokens, HIDDEN, dtype=torch.float64)
    gate_up, down = layer.gate_up.dequantize(), layer.down.dequantize()
    for token in range(tokens):
        for rank in range(TOP_K):
            expert = int(routing.experts[token, rank])
            added[token] += routing.weights[token, rank] * mlp(inputs[token], gate_up[expert], down[expert])
        both = layer.shared_gate_up.dequantize(), layer.shared_down.dequantize()
        added[token] += routing.shared[token] * mlp(inputs[token], *both)
    after, scaled, squares = run_experts(layer, x)
    assert float(added.norm() / x.double().norm()) > 0.02, "the experts must show in the sum"
    expected = x.double() + added
    # the interpreter rounds the activation and the sum towards zero: up to one bf16 step each
    assert float((after.double() - expected).norm() / expected.norm()) < 2.0**-7
    torch.testing.assert_close(scaled.float(), after.float() * layer.next_scale, rtol=2.0**-7, atol=1e-6)
    torch.testing.assert_close(squares.sum(1), after.float().square().sum(1))


def check_rows() -> None:
    layer = Layer.random(Kind.INT4, Kind.FP8, experts=3)
    x = torch.randn(10, HIDDEN).bfloat16()  # two tiles for some experts
    together = run_experts(layer, x)
    apart = run_experts(layer, x[7:8])
    for found, expected in zip(apart, together, strict=True):
        assert torch.equal(found[0], expected[7])
    assert torch.equal(run_experts(layer, x.flip(0))[0], together[0].flip(0))


def check_messages() -> None:
    from stoker.backends.gpu.kernels.experts import ExpertBuffers, experts
    from stoker.backends.gpu.kernels.linear import Stream
    from stoker.backends.gpu.kernels.route import route

    layer = Layer.random(Kind.INT4, Kind.BF16)
    x = torch.randn(4, HIDDEN).bfloat16()
    routing, scaled, space = routed(layer, x)
    stream, buffers = Stream(x, layer.next_scale, scaled), ExpertBuffers.allocate(4, TOP_K, INTER, HIDDEN, "cpu")
    squares = torch.empty(4, HIDDEN // 16)

    def call(**changes: Any) -> None:
        weights = {
            "gate_up": layer.gate_up,
            "down": layer.down,
            "shared_gate_up": layer.shared_gate_up,
            "shared_down": layer.shared_down,
        }
        rest = {"buffers": buffers, "squares": squares, "workspace": space, "next_scale": layer.next_scale, "eps": EPS}
        experts(stream, routing, **{**weights, **rest, **changes})

    wrong = [
        (
            lambda: route(x, scaled[:3], layer.router, routing, space, eps=EPS, renormalize=True, shared=True),
            "scaled must be [4, 128], found [3, 128].",
        ),
        (
            lambda: route(x, scaled, packed(Kind.BF16, 2, HIDDEN)[0], routing, space, eps=EPS, renormalize=True,
                          shared=True),
            "top_k must be 1 to 1, found 2.",
        ),
        (lambda: call(shared_down=None), "shared_gate_up and shared_down belong together: give both or none."),
        (lambda: call(squares=squares[:, :4]), "squares must be [4, 8], found [4, 4]."),
        (
            lambda: call(down=packed(Kind.FP8, EXPERTS, HIDDEN, INTER)[0]),
            "gate_up is INT4 and down FP8: they must be of one format.",
        ),
        (
            lambda: call(shared_down=packed(Kind.BF16, HIDDEN, 2 * INTER)[0]),
            "the shared expert must be as wide as the routed ones, [256, 128] and [128, 128], "
            "found [256, 128] and [128, 256].",
        ),
    ]  # fmt: skip
    for action, message in wrong:
        with pytest.raises(ValueError, match=re.escape(message)):
            action()
