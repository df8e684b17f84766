"""Thousands of steps on end: do the states drift, does memory grow, does anything turn into NaN?

    PYTHONPATH=src:. python benchmarks/gpu/soak.py --steps 2000 --json soak.json

Steps that verify drafts, accept some and reject the rest run from an empty context; then the accepted tokens alone, one
at a time. Both must leave the same recurrent states and the same keys, bit for bit, and the memory they began with.
"""

import argparse
import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.decode import WARM_UP, Decode, shortened, timed
from benchmarks.gpu.result import device_name, record
from benchmarks.gpu.weights import SHAPES, random_model
from stoker.backends.family import PAGE_SIZE
from stoker.backends.gpu.kernels.deltanet import DeltaRing
from stoker.backends.gpu.weights import StepWeights
from stoker.backends.network.cache import KVPages
from stoker.weights.model_config import ModelConfig


def decode_of(config: ModelConfig, weights: StepWeights, draft: str, length: float | None, steps: int) -> Decode:
    return Decode(config, weights, 1, draft, length, 0, steps, pdl=True, kv_dtype=torch.bfloat16)


def soak(config: ModelConfig, weights: StepWeights, draft: str, length: float, steps: int) -> dict[str, Any]:
    blocks = decode_of(config, weights, draft, length, steps)
    assert blocks.assumed is not None
    blocks.capture()
    begun = blocks.done
    memory = _memory()
    seconds = timed(lambda: blocks.run(steps))[1]
    grown = _memory() - memory
    places = torch.arange(begun + steps) % len(blocks.ids)
    counts, rows = blocks.assumed[:, 0].cpu()[places].tolist(), blocks.ids.cpu()[places].tolist()
    tokens = [token for row, count in zip(rows, counts, strict=True) for token in row[:count]]
    held = len(tokens) - counts[-1]  # the last step's tokens are taken into the state by the next one
    single = decode_of(config, weights, "none", None, len(tokens))
    single.ids = torch.tensor(tokens, dtype=torch.int32, device=single.device)[:, None]
    single.capture()
    single.run(held + 1 - single.done)
    pairs = [(_committed(a, blocks, held), _committed(b, single, held)) for a, b in _layers(blocks, single)]
    return {
        "draft": draft,
        "steps": steps,
        "tokens": len(tokens),
        "seconds": seconds,
        "states_equal": all(torch.equal(a, b) for a, b in pairs),
        "finite": all(bool(a.isfinite().all()) for a, _ in pairs),
        "largest_state": max(float(a.abs().max()) for a, _ in pairs),
        "memory_grown_bytes": grown,
    }


def _layers(one: Decode, other: Decode) -> list[tuple[KVPages | DeltaRing, KVPages | DeltaRing]]:
    return list(zip(one.step.cache.layers, other.step.cache.layers, strict=True))


def _committed(layer: KVPages | DeltaRing, decode: Decode, tokens: int) -> Tensor:
    """The state, or the keys and values of the first tokens as the page table orders them."""
    if isinstance(layer, DeltaRing):
        return layer.recurrent[0]
    pages = decode.step.inputs.tables[0, : -(-tokens // PAGE_SIZE)].long()
    return torch.stack([part[pages].flatten(0, 1)[:tokens] for part in (layer.keys, layer.values)])


def _memory() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.5-122b-a10b", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, help="only so many layers")
    parser.add_argument("--weights", default="hybrid", choices=["int4", "hybrid", "nvfp4"])
    parser.add_argument("--draft", default="mtp:2", help="mtp:K")
    parser.add_argument("--accept-length", type=float, default=2.6, help="tokens per step to assume")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    options = parser.parse_args(arguments)
    config = shortened(SHAPES[options.shape], options.layers)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = random_model(config, options.weights, device, 4 * (options.steps + WARM_UP + 64))
    found = soak(config, weights, options.draft, options.accept_length, options.steps)
    print(f"{device_name()}: {found}")
    result = record("gpu/soak", options.json, arguments, shape=options.shape, weights=options.weights, **found)
    if not (found["states_equal"] and found["finite"] and found["memory_grown_bytes"] == 0):
        sys.exit("states drifted, memory grew or a value is not finite: see the line above")
    return result


if __name__ == "__main__":
    main()
