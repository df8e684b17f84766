"""Decode speed at real shapes with random weights made on the device; nothing is downloaded.

    PYTHONPATH=src:. python benchmarks/gpu/decode.py --shape qwen3.5-122b-a10b --weights int4,hybrid --batch 1,2,4 \\
        --draft none,mtp:2 --accept-length 2.6 --context 128 --json result.json

Prints the physical ceiling first (bytes a step must read over what the memory delivers), then the result, JSON last.
Before anything is timed, the step is checked: a block of tokens must give the logits of the same tokens one by one, bit
for bit. With `--accept-length` acceptance is assumed, since random weights accept nothing. Tokens fed are random, so
that experts are spread as with independent routing; a row whose distinct experts are more than 5 % off says so. Each
step ends with a read of the accepted tokens by the host, as serving does.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.device_loop import Accepted, DFlashDraft, MtpDraft, accept, advance
from benchmarks.gpu.result import device_name, record
from benchmarks.gpu.timing import bandwidth
from benchmarks.gpu.weights import DRAFTERS, SHAPES, random_drafter, random_model
from stoker.backends.family import PAGE_SIZE, SPLIT
from stoker.backends.gpu.dflash import DFlashWeights
from stoker.backends.gpu.graphs import Recorder
from stoker.backends.gpu.mtp import mtp_bytes
from stoker.backends.gpu.state import Bucket, GpuCache
from stoker.backends.gpu.step import Step
from stoker.backends.gpu.weights import LayerWeights, StepWeights
from stoker.backends.network.cache import KVPages
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import SLIDING, ModelConfig

DFlashPart = tuple[DFlashConfig, DFlashWeights]
PATTERN = 1024  # steps after which assumed acceptance and random tokens repeat
WARM_UP = 12


class Decode:
    """Steps of one batch: verify, accept, draft, and on to the next; two CUDA graphs where there is a GPU."""

    def __init__(
        self, config: ModelConfig, weights: StepWeights, batch: int, draft: str, length: float | None, context: int,
        steps: int, *, pdl: bool, kv_dtype: torch.dtype, dflash: DFlashPart | None = None,
    ) -> None:  # fmt: skip
        self.config, self.weights, self.device = config, weights, weights.embedding.device
        kind, depth = parse_draft(draft)
        rows = depth + 1
        last = context + (steps + WARM_UP + 24) * rows
        bucket = Bucket(batch, rows, -(-last // SPLIT))
        pages = bucket.splits * SPLIT // PAGE_SIZE
        cache = GpuCache.allocate(
            config, pages=batch * pages, slots=batch, window=rows, device=self.device, kv_dtype=kv_dtype
        )
        for state in cache.layers:
            if isinstance(state, KVPages):
                _fill(state)
        self.step = Step(config, weights, cache, bucket, pdl=pdl, taps=dflash[0].taps if dflash else ())
        inputs = self.step.inputs
        inputs.tables.copy_(torch.arange(batch * pages, device=self.device).view(batch, pages))
        inputs.sequences.slots.copy_(torch.arange(batch, device=self.device))
        inputs.sequences.cached.fill_(context)
        self.accepted = Accepted.allocate(self.step)
        self.drafter: MtpDraft | DFlashDraft | None = None
        if kind == "mtp":
            self.drafter = MtpDraft(self.step, batch * pages, depth)
        elif dflash is not None:
            self.drafter = DFlashDraft(self.step, *dflash, batch * pages, depth)
        self.assumed = None if length is None else assumed_counts(length, rows, batch).to(self.device)
        self.ids = torch.randint(0, config.vocab_size, (PATTERN, bucket.tokens), device=self.device, dtype=torch.int32)
        self.clock = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.host = torch.zeros(batch, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self.graph: Callable[[], None] | None = None
        self.done = 0  # steps that ran

    def once(self) -> None:
        self._first()
        self._rest()

    def _first(self) -> None:
        torch.index_select(self.ids, 0, self.clock, out=self.step.inputs.token_ids.view(1, -1))
        self.step.first()

    def _rest(self) -> None:
        self.step.rest()
        assumed = None if self.assumed is None else self.assumed.index_select(0, self.clock)[0]
        accept(self.step, self.accepted, assumed)
        if self.drafter is not None:
            self.drafter.draft(self.accepted.last_rows)
        advance(self.step, self.accepted, self.drafter.drafts if self.drafter else None)
        self.host.copy_(self.accepted.counts, non_blocking=True)
        self.clock.add_(1).remainder_(len(self.ids))

    def capture(self) -> None:
        """One step as it is compiles the kernels; the rest run as graphs."""
        self.done += 1
        if self.device.type != "cuda":
            self.once()
            return
        self.graph = Recorder(self.device).record(self._first, self._rest)
        self.run(WARM_UP)

    def run(self, steps: int, read: bool = True) -> tuple[float, int]:
        """Seconds of so many steps, and the tokens they gained; `read`: the host looks at each step's."""
        tokens = 0
        self._wait()
        self.done += steps
        start = time.perf_counter()
        for _ in range(steps):
            if self.graph is None:
                self.once()
            else:
                self.graph()
            if read:
                self._wait()
                tokens += sum(self.host.tolist())
        self._wait()
        return time.perf_counter() - start, tokens

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def distinct_experts(self, more: int) -> float:
        """Mean over layers, of the last step and so many more."""
        found = [len(routing.experts.unique()) for routing in self.step.buffers.routing]
        for _ in range(more):
            self.run(1)
            found += [len(routing.experts.unique()) for routing in self.step.buffers.routing]
        return statistics.mean(found)


def parse_draft(draft: str) -> tuple[str, int]:
    kind, _, depth = draft.partition(":")
    if kind == "none":
        return kind, 0
    if kind not in ("mtp", "dflash") or not depth.isdigit() or not 1 <= int(depth) <= 15:
        raise SystemExit(f"--draft must be none, mtp:K or dflash:K with K from 1 to 15, not {draft}.")
    return kind, int(depth)


def shortened(config: ModelConfig, layers: int | None) -> ModelConfig:
    """Its first layers only; None or 0: all of them."""
    if not layers:
        return config
    return replace(config, layer_types=config.layer_types[:layers], sparse_layers=config.sparse_layers[:layers])


def drafter_for(shape: str, config: ModelConfig) -> DFlashConfig:
    """Its taps lie in proportion where the trunk has fewer layers, so that it is as large as for all of them."""
    own, layers = DRAFTERS[shape], len(config.layer_types)
    return replace(own, taps=tuple(tap * layers // len(SHAPES[shape].layer_types) for tap in own.taps))


def assumed_counts(length: float, rows: int, batch: int) -> Tensor:
    """[PATTERN, B] int32 tokens gained by each step, whole numbers whose mean is `length`."""
    if not 1 <= length <= rows:
        raise SystemExit(f"--accept-length {length} is not between 1 and the {rows} tokens of a step.")
    step = torch.arange(PATTERN + 1)[:, None] + torch.arange(batch) * 0.37
    return (step * length).floor().diff(dim=0).clamp(1, rows).int()


def _fill(pages: KVPages) -> None:
    """Keys and values of a context that nobody computed."""
    for tensor in (pages.keys, pages.values):
        if tensor.dtype is torch.bfloat16:
            tensor.normal_()
        else:  # any codes but NaN
            codes = torch.randint(0, 0x78, tensor.shape, dtype=torch.uint8, device=tensor.device)
            tensor.view(torch.uint8).copy_(codes)
    for scales in (pages.key_scales, pages.value_scales):
        if scales is not None:
            scales.fill_(0.01)


def expected_distinct(config: ModelConfig, tokens: int) -> float:
    assert config.moe is not None
    experts = config.moe.num_experts
    return experts * (1.0 - (1.0 - config.moe.top_k / experts) ** tokens)


def bytes_per_step(
    config: ModelConfig, weights: StepWeights, batch: int, draft: str, context: float, distinct: float, kv_bytes: int,
    dflash: DFlashPart | None = None,
) -> int:  # fmt: skip
    """What a step must read, and the state it must write; activations apart."""
    kind, depth = parse_draft(draft)

    def layer_bytes(layer: LayerWeights, experts: float) -> float:
        moe = layer.moe
        parts = [layer.mixer.inputs, layer.mixer.out, moe.router, moe.shared_gate_up, moe.shared_down]
        whole = sum(part.nbytes for part in parts if part is not None)
        return whole + experts * (moe.gate_up.nbytes + moe.down.nbytes) / moe.gate_up.packed.shape[0]

    keys = 2 * config.num_kv_heads * config.head_dim * kv_bytes * batch * context  # of one layer
    total = sum(layer_bytes(layer, distinct) for layer in weights.layers) + keys * len(config.full_layers)
    total += weights.head.nbytes
    if config.delta is not None:
        delta = config.delta
        state = delta.value_heads * delta.key_dim * delta.value_dim * 4
        total += len(config.linear_layers) * batch * 2 * state
    if kind == "mtp" and weights.mtp is not None:
        for index in range(depth):
            experts = distinct if index == 0 else expected_distinct(config, batch)
            moe = weights.mtp.layer.moe
            chosen = experts * (moe.gate_up.nbytes + moe.down.nbytes) / moe.gate_up.packed.shape[0]
            total += weights.head.nbytes + mtp_bytes(weights.mtp) + chosen + keys
    if dflash is not None:
        own = dflash[0]
        seen = sum(min(context, own.sliding_window) if kind == SLIDING else context for kind in own.layer_types)
        total += weights.head.nbytes + dflash[1].nbytes + 2 * own.num_kv_heads * own.head_dim * 2 * batch * seen
    return round(total)


def check_step(config: ModelConfig, weights: StepWeights, block: int) -> dict[str, Any]:
    """Logits of a block of tokens, alone and beside other sequences, against the same tokens one by one, bitwise."""

    def logits(batch: int, rows: int, steps: int, ids: Tensor) -> Tensor:
        device = weights.embedding.device
        cache = GpuCache.allocate(config, pages=4 * batch, slots=batch, window=rows, device=device)
        step = Step(config, weights, cache, Bucket(batch, rows, 1), logits=True)
        step.inputs.tables.copy_(torch.arange(4 * batch, device=device).view(batch, 4))
        step.inputs.sequences.slots.copy_(torch.arange(batch, device=device))
        found = []
        for index in range(steps):
            step.inputs.token_ids.copy_(ids[:, index * rows : (index + 1) * rows].flatten())
            step.forward()
            assert step.buffers.best.logits is not None
            found.append(step.buffers.best.logits.view(batch, rows, -1).clone())
            step.inputs.sequences.cached.add_(rows)
            step.inputs.sequences.replay.fill_(rows)
        return torch.cat(found, dim=1)[0]

    ids = torch.randint(0, config.vocab_size, (3, 2 * block), device=weights.embedding.device, dtype=torch.int32)
    alone = logits(1, 1, 2 * block, ids[:1])
    blocks, company = logits(1, block, 2, ids[:1]), logits(3, block, 2, ids)
    return {
        "block": block,
        "block_equals_single": torch.equal(blocks, alone),
        "company_equals_alone": torch.equal(company, alone),
        "finite": bool(alone.isfinite().all()),
    }


def operation_times(decode: Decode) -> list[dict[str, Any]]:
    """Microseconds per step and kernel, from the profiler, while graphs are replayed one after the other."""
    from torch.profiler import ProfilerActivity, profile

    assert decode.graph is not None
    steps = 5
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            decode.graph()
        torch.cuda.synchronize()
    decode.done += steps
    events = [event for event in profiler.events() if "cuda" in str(event.device_type).lower()]
    events.sort(key=lambda event: event.time_range.start)
    times = [(event.time_range.start, event.time_range.end) for event in events]
    return shares(labels([event.name for event in events]), times, steps)


def shares(names: list[str], times: list[tuple[float, float]], steps: int) -> list[dict[str, Any]]:
    """What each kernel adds: from the end of the kernel before to its own end. With dependent launch it starts before
    that and waits inside, so its duration says more of its neighbours than of itself."""
    found: dict[str, list[tuple[float, float]]] = {}
    before = times[0][0]
    for name, (start, end) in zip(names, times, strict=True):
        found.setdefault(name, []).append((end - before, end - start))
        before = end
    rows = [
        {
            "kernel": name,
            "launches": len(each) / steps,
            "us": sum(added for added, _ in each) / steps,
            "us_each": statistics.median(added for added, _ in each),
            "us_inside": statistics.median(inside for _, inside in each),
        }
        for name, each in found.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def labels(names: list[str]) -> list[str]:
    """Kernels in the order they ran; `linear_kernel` is told apart by what comes before and after it."""
    found: list[str] = []
    role = "in"
    for name in names:
        label = name[:40]
        if name == "linear_kernel":
            label, role = f"linear {role}", "out"
        elif name == "mtp_inputs_kernel":
            role = "mtp fc"
        elif name in ("begin_kernel", "down_kernel"):
            role = "in"
        elif name == "best_kernel":
            last = max((i for i, label in enumerate(found) if label.startswith("linear")), default=None)
            if last is not None:
                found[last] = "linear head"
        found.append(label)
    return found


def measure(
    config: ModelConfig, weights: StepWeights, options: argparse.Namespace, batch: int, draft: str, context: int,
    delivered: dict[str, float], name: str, dflash: DFlashPart | None,
) -> dict[str, Any]:  # fmt: skip
    kind, depth = parse_draft(draft)
    dflash = dflash if kind == "dflash" else None
    length = None if kind == "none" else options.accept_length
    kv_dtype = torch.float8_e4m3fn if options.kv == "fp8" else torch.bfloat16
    decode = Decode(config, weights, batch, draft, length, context, (options.runs + 1) * options.steps, pdl=options.pdl,
                    kv_dtype=kv_dtype, dflash=dflash)  # fmt: skip
    decode.capture()
    distinct = decode.distinct_experts(4 if decode.graph else 0)
    runs = [decode.run(options.steps) for _ in range(options.runs)]
    seconds, tokens = min(runs)
    apart = decode.run(options.steps, read=False)[0] if decode.graph else seconds
    steps_per_s = options.steps / seconds
    tokens_all = batch * (depth + 1)
    # keys grow while it runs: the mean of what was there
    seen = float(decode.step.inputs.sequences.cached.float().mean())
    bytes_ = bytes_per_step(config, weights, batch, draft, (context + seen) / 2, distinct, kv_dtype.itemsize, dflash)
    best = max(delivered.values())
    expected = expected_distinct(config, tokens_all)
    row = {
        "shape": options.shape,
        "weights": name,
        "batch": batch,
        "draft": draft,
        "accept_length": tokens / options.steps / batch,
        "acceptance_source": "assumed" if length is not None else "no drafts" if kind == "none" else "measured",
        "context": context,
        "kv": options.kv,
        "tokens_per_s": tokens / seconds,
        "steps_per_s": steps_per_s,
        "steps_per_s_without_host_reads": options.steps / apart,
        "spread": max(run[0] for run in runs) / seconds - 1.0,
        "bytes_per_step": bytes_,
        "copy_bandwidth": delivered["copy"],
        "read_bandwidth": delivered["read"],
        "ceiling_steps_per_s": best / bytes_,
        "fraction_of_ceiling": steps_per_s * bytes_ / best,
        "distinct_experts": distinct,
        "distinct_expected": expected,
        "counts": abs(distinct / expected - 1.0) <= 0.05,
        "drafter_runs": decode.drafter is not None,
        "dependent_launch": options.pdl,
    }
    if options.operations and decode.graph is not None:
        try:
            row["operations"] = operation_times(decode)
        except Exception as failure:  # the profiler's trouble must not cost the row
            row["operations_failed"] = f"{type(failure).__name__}: {failure}"
    return row


def print_row(row: dict[str, Any]) -> None:
    notes = [] if row["counts"] else [f"DOES NOT COUNT: {row['distinct_expected']:.1f} distinct experts expected"]
    notes += [f"acceptance {row['acceptance_source']}"] if row["draft"] != "none" else []
    print(
        f"{row['weights']:7} batch {row['batch']:3} {row['draft']:10} context {row['context']:7,}: "
        f"ceiling {row['ceiling_steps_per_s']:7.1f} steps/s ({row['bytes_per_step'] / 1e9:.2f} GB), "
        f"measured {row['steps_per_s']:7.1f} = {row['fraction_of_ceiling']:.0%}, {row['tokens_per_s']:8.1f} tokens/s "
        f"at {row['accept_length']:.2f} per step, {row['distinct_experts']:.1f} experts a layer"
        + "".join(f"; {note}" for note in notes),
        flush=True,
    )
    for part in row.get("operations", [])[:14]:
        print(
            f"  {part['kernel']:24}{part['launches']:6.0f} launches {part['us']:9.1f} us, {part['us_each']:7.2f} each"
        )


def host_bandwidth() -> dict[str, float]:
    """Without a GPU, where only the path is tried."""
    source = torch.ones(1 << 20)
    start = time.perf_counter()
    source.clone()
    speed = 8 * source.numel() / (time.perf_counter() - start)
    return {"copy": speed, "read": speed}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.5-122b-a10b", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, help="only so many layers, where memory is short")
    parser.add_argument("--weights", default="int4", help="int4, hybrid or nvfp4, or several of them")
    parser.add_argument("--batch", default="1,2,4", help="sequences, or several numbers of them")
    parser.add_argument("--draft", default="none", help="none, mtp:K or dflash:K, or several of them")
    parser.add_argument("--accept-length", type=float, help="tokens per step to assume where there are drafts")
    parser.add_argument("--context", default="128", help="tokens before the first step, or several numbers of them")
    parser.add_argument("--kv", default="bf16", choices=["bf16", "fp8"])
    parser.add_argument("--steps", type=int, default=128, help="of each run")
    parser.add_argument("--runs", type=int, default=2, help="the faster counts; both are in the spread")
    parser.add_argument("--pdl", action=argparse.BooleanOptionalAction, default=True, help="dependent launch")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="bits of the step first")
    parser.add_argument("--operations", action="store_true", help="time per kernel, from the profiler")
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    config = shortened(SHAPES[options.shape], options.layers)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    torch.manual_seed(0)
    delivered = bandwidth() if gpu else host_bandwidth()
    print(f"{device_name()}: copies {delivered['copy'] / 1e12:.2f} TB/s, reads {delivered['read'] / 1e12:.2f} TB/s")
    contexts = [int(context) for context in options.context.split(",")]
    rows: list[dict[str, Any]] = []
    checks: dict[str, Any] = {}
    for name in options.weights.split(","):
        positions = max(contexts) + ((options.runs + 1) * options.steps + WARM_UP + 24) * 16
        weights, seconds = timed(partial(random_model, config, name, device, positions))
        print(f"{name}: random weights of {len(config.layer_types)} layers made in {seconds:.1f} s", flush=True)
        if options.check:
            checks[name] = check_step(config, weights, 4 if gpu else 2)
            print(f"{name}: {checks[name]}", flush=True)
        dflash = None
        if "dflash" in options.draft:
            own = drafter_for(options.shape, config)
            dflash = own, random_drafter(own, name, device, positions)
            print(f"{name}: DFlash drafter of {dflash[1].nbytes / 1e9:.2f} GB, {len(own.taps)} taps", flush=True)
        for context in contexts:
            for draft in options.draft.split(","):
                for batch in options.batch.split(","):
                    row = measure(config, weights, options, int(batch), draft, context, delivered, name, dflash)
                    rows.append(row)
                    print_row(row)
        del weights
    result = record("gpu_decode", options.json, arguments, weights="random", checks=checks, rows=rows)
    if not all(check[key] for check in checks.values() for key in check if key != "block"):
        sys.exit("a check failed: see the lines above")
    return result


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    found = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found, time.perf_counter() - start


if __name__ == "__main__":
    main()
