"""Seconds of an agent's turn at real shapes: 512 new tokens behind a cached past, then an answer of 256 with drafts.

    PYTHONPATH=src:. python benchmarks/gpu/turn.py --context 8192,32768,100000 --draft mtp:2 --json turn.json

Random weights made on the device, and a past whose keys nobody computed. A turn is what serving does with a prefix that
is cached: the recurrent states are copied back, the new tokens go through prefill, the answer through recorded steps
that verify and draft, each read by the host. Acceptance is assumed, since random weights accept nothing. The same turn
without a past is measured beside it: what the past adds is reading its keys, and comparing with them.
"""

import argparse
import math
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.decode import WARM_UP, Decode, timed
from benchmarks.gpu.prefill import Prompt
from benchmarks.gpu.result import device_name, record
from benchmarks.gpu.timing import bandwidth
from benchmarks.gpu.weights import SHAPES, random_model
from stoker.backends.family import CHUNK
from stoker.backends.gpu.slots import SlotCache
from stoker.backends.gpu.weights import StepWeights
from stoker.weights.model_config import ModelConfig


def measure(config: ModelConfig, weights: StepWeights, options: argparse.Namespace, context: int) -> dict[str, Any]:
    prompt = Prompt(config, weights, options.new, context, -(-options.new // CHUNK) * CHUNK, torch.bfloat16)
    slots = SlotCache(prompt.cache, weights, 1)
    snapshots = slots.snapshots(1)
    snapshots.save(slots, 0, 0)
    prompt.run(prompt.cuts())  # compiles
    restored = min(timed(partial(snapshots.restore, slots, 0, 0))[1] for _ in range(options.runs))
    read = min(timed(partial(prompt.run, prompt.cuts()))[1] for _ in range(options.runs))
    del prompt, slots, snapshots
    steps = math.ceil(options.answer / options.accept_length)
    decode = Decode(config, weights, 1, options.draft, options.accept_length, context + options.new,
                    options.runs * steps, pdl=True, kv_dtype=torch.bfloat16)  # fmt: skip
    decode.capture()
    written, tokens = min(decode.run(steps) for _ in range(options.runs))
    layers = len(config.full_layers)
    return {
        "shape": options.shape,
        "weights": options.weights,
        "context": context,
        "new_tokens": options.new,
        "answer_tokens": tokens,
        "draft": options.draft,
        "accept_length": tokens / steps,
        "acceptance_source": "assumed",
        "seconds": restored + read + written,
        "restore_s": restored,
        "prefill_s": read,
        "decode_s": written,
        "steps": steps,
        "past_bytes_per_step": 4 * config.num_kv_heads * config.head_dim * layers * context,
        "layers": len(config.layer_types),
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.5-122b-a10b", choices=list(SHAPES))
    parser.add_argument("--weights", default="hybrid", choices=["int4", "hybrid", "nvfp4"])
    parser.add_argument("--context", default="8192,32768,100000", help="tokens of the cached past, or several numbers")
    parser.add_argument("--new", type=int, default=512, help="tokens that are not cached")
    parser.add_argument("--answer", type=int, default=256, help="tokens of the answer")
    parser.add_argument("--draft", default="mtp:2", help="mtp:K")
    parser.add_argument("--accept-length", type=float, default=2.6, help="tokens per step to assume")
    parser.add_argument("--runs", type=int, default=3, help="the fastest counts")
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    config, gpu = SHAPES[options.shape], torch.cuda.is_available()
    torch.manual_seed(0)
    delivered = bandwidth()["read"] if gpu else 1e9
    contexts = [0, *(int(number) for number in options.context.split(","))]
    longest = max(contexts) + options.new + 16 * (options.runs * options.answer + WARM_UP + 24)
    weights = random_model(config, options.weights, torch.device("cuda" if gpu else "cpu"), longest)
    rows: list[dict[str, Any]] = []
    print(f"{device_name()}: {options.new} tokens in, {options.answer} out, {options.draft}", flush=True)
    for context in contexts:
        row = measure(config, weights, options, context)
        rows.append(row)
        steps, extra = row["decode_s"] / row["steps"], 0.0
        if context:
            extra = steps - rows[0]["decode_s"] / rows[0]["steps"]
            row["step_extra_s"], row["step_extra_by_bytes_s"] = extra, row["past_bytes_per_step"] / delivered
        print(
            f"behind {context:7,} cached: {row['seconds']:.3f} s = {row['restore_s'] * 1e3:.1f} ms states, "
            f"{row['prefill_s'] * 1e3:.0f} ms prefill, {row['decode_s']:.3f} s for {row['answer_tokens']} tokens; a "
            f"step {steps * 1e3:.2f} ms"
            + (f", {extra * 1e3:.2f} for the past, whose keys take {row['step_extra_by_bytes_s'] * 1e3:.2f} to read"
               if context else ""),
            flush=True,
        )  # fmt: skip
    return record("gpu/turn", options.json, arguments, read_bandwidth=delivered, rows=rows)


if __name__ == "__main__":
    main()
