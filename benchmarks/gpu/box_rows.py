"""What `make box-report` measures: its rows, how many layers memory allows, and what the planner predicts for them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import decode as gpu_decode
from benchmarks.gpu.weights import SHAPES, random_drafter, random_model
from stoker.backends.gpu.dflash import DFlashWeights
from stoker.backends.gpu.weights import StepWeights
from stoker.cards import Card
from stoker.plan.answer import parse_draft
from stoker.plan.catalog import GIB, find_model, find_scheme
from stoker.plan.machine import box_of
from stoker.plan.speed import fitted, predict
from stoker.server.lifecycle.memory_guard import read_memory
from stoker.sizes.weights import WeightBytes
from stoker.weights.model_config import FULL, ModelConfig

SCHEMES = {"hybrid": "int4+fp8+int8head", "int4": "int4"}  # formats as the planner calls them
RUNTIME = GIB  # graphs, compiled kernels, the allocator's rounding (assumed)
CARD_RESERVE = GIB // 2  # of a card's own memory, for whoever draws the screen
MAKING = 6  # bytes per weight that a matrix in 16 bit takes beside itself while it is drawn in fp32


@dataclass(frozen=True)
class Case:
    """One row to measure."""

    weights: str
    batch: int
    draft: str
    accept_length: float | None  # tokens per step to assume; random weights accept nothing
    context: int

    def __str__(self) -> str:
        return f"{self.weights}, batch {self.batch}, drafts {self.draft}, context {self.context:,}"

    @property
    def key(self) -> dict[str, Any]:
        return {"weights": self.weights, "batch": self.batch, "draft": self.draft, "context": self.context}


def cases(short: int = 128, long: int = 32768) -> list[Case]:
    """One long context is enough: what keys cost depends on no format of weights."""
    blocks = [(1, "none", None), (1, "mtp:2", 2.6), (1, "dflash:12", 9.3), (4, "none", None), (4, "mtp:2", 2.6)]
    rows = [Case(weights, *block, short) for weights in SCHEMES for block in blocks]
    return [*rows[:5], Case("hybrid", 1, "none", None, long), *rows[5:]]


@dataclass(frozen=True)
class Network:
    """Random weights of one format, the drafter's included."""

    config: ModelConfig
    trunk: StepWeights
    drafter: DFlashWeights

    def first(self, layers: int) -> "Network":
        """The same memory, with fewer layers of the trunk."""
        config = gpu_decode.shortened(self.config, layers)
        return Network(config, replace(self.trunk, layers=self.trunk.layers[:layers]), self.drafter)


@dataclass(frozen=True)
class Measuring:
    """How rows are measured; `rows` are all that may be asked for."""

    shape: str
    rows: Sequence[Case]
    steps: int
    runs: int

    def network(self, weights: str, layers: int, device: torch.device | str) -> Network:
        config = gpu_decode.shortened(SHAPES[self.shape], layers)
        longest = max(row.context for row in self.rows)
        positions = longest + ((self.runs + 1) * self.steps + gpu_decode.WARM_UP + 24) * 16
        trunk = random_model(config, weights, device, positions)
        drafter = random_drafter(gpu_decode.drafter_for(self.shape, config), weights, device, positions)
        return Network(config, trunk, drafter)

    def measure(self, case: Case, network: Network, delivered: dict[str, float]) -> dict[str, Any]:
        """One row; where not all layers are there, those that are and half of them, from which all are extrapolated."""
        present = len(network.config.layer_types)
        found = [self._measure(case, network, delivered)]
        if present < len(SHAPES[self.shape].layer_types):
            found.append(self._measure(case, network.first(half(SHAPES[self.shape], present)), delivered))
        return {**found[0], "whole": whole(found, len(SHAPES[self.shape].layer_types), max(delivered.values()))}

    def _measure(self, case: Case, network: Network, delivered: dict[str, float]) -> dict[str, Any]:
        options = gpu_decode.parse(["--shape", self.shape, "--steps", str(self.steps), "--runs", str(self.runs)])
        options.accept_length = case.accept_length
        drafter = gpu_decode.drafter_for(self.shape, network.config), network.drafter
        row = gpu_decode.measure(
            network.config,
            network.trunk,
            options,
            case.batch,
            case.draft,
            case.context,
            delivered,
            case.weights,
            drafter,
        )
        return {**row, "layers": len(network.config.layer_types)}

    def needed_bytes(self, layers: int) -> int:
        """Of the largest format, its largest row and what making it takes, read off the very tensors on the meta
        device: it cannot drift from what is allocated."""
        largest = 0
        for weights in dict.fromkeys(row.weights for row in self.rows):
            network = self.network(weights, layers, "meta")
            making = MAKING * network.config.vocab_size * network.config.hidden_size
            running = [
                storage_bytes((network, self._decode(row, network))) for row in self.rows if row.weights == weights
            ]
            largest = max(largest, storage_bytes(network) + making, *running)
        return largest + RUNTIME

    def _decode(self, case: Case, network: Network) -> gpu_decode.Decode:
        drafter = gpu_decode.drafter_for(self.shape, network.config), network.drafter
        return gpu_decode.Decode(
            network.config, network.trunk, case.batch, case.draft, case.accept_length, case.context,
            (self.runs + 1) * self.steps, pdl=True, kv_dtype=torch.bfloat16,
            dflash=drafter if case.draft.startswith("dflash") else None,
        )  # fmt: skip


def storage_bytes(holder: object) -> int:
    """Of all tensors that can be reached from here; memory that several of them share counts once."""
    seen: set[int] = set()
    found: dict[int, int] = {}
    waiting: list[object] = [holder]
    while waiting:
        part = waiting.pop()
        if id(part) in seen or isinstance(part, type):
            continue
        seen.add(id(part))
        if isinstance(part, Tensor):
            storage = part.untyped_storage()
            found[storage._cdata] = storage.nbytes()
        elif isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, list | tuple):
            waiting += part
        elif type(part).__module__.startswith(("stoker.", "benchmarks.")) and hasattr(part, "__dict__"):
            waiting += vars(part).values()
    return sum(found.values())


def pattern(config: ModelConfig) -> int:
    """Layers after which their kinds repeat."""
    return config.layer_types.index(FULL) + 1


def half(config: ModelConfig, layers: int) -> int:
    each = pattern(config)
    return max(each, layers // 2 // each * each)


def possible_layers(config: ModelConfig) -> list[int]:
    """All, then fewer by a pattern; at least two patterns, since a layer's time is a difference."""
    count, each = len(config.layer_types), pattern(config)
    return [count, *range((count - 1) // each * each, each, -each)]


def whole(found: Iterable[dict[str, Any]], layers: int, bandwidth: float) -> dict[str, Any]:
    """Speed with all layers: measured, or by what the layers that are too many for half of them took and read."""
    row, *fewer = found
    seconds, size, source = 1.0 / row["steps_per_s"], float(row["bytes_per_step"]), "measured"
    if fewer:
        apart, missing = row["layers"] - fewer[0]["layers"], layers - row["layers"]
        each = (seconds - 1.0 / fewer[0]["steps_per_s"]) / apart
        if each <= 0:
            raise RuntimeError(
                f"{row['layers']} layers took no longer than {fewer[0]['layers']}: the times are too noisy to say what "
                "a layer takes. Run again with more --steps and nothing else on the machine."
            )
        seconds += missing * each
        size += missing * (row["bytes_per_step"] - fewer[0]["bytes_per_step"]) / apart
        source = f"extrapolated from {row['layers']} and {fewer[0]['layers']} layers"
    return {
        "layers": layers,
        "source": source,
        "tokens_per_s": row["accept_length"] * row["batch"] / seconds,
        "steps_per_s": 1.0 / seconds,
        "bytes_per_step": round(size),
        "ceiling_steps_per_s": bandwidth / size,
        "fraction_of_ceiling": size / bandwidth / seconds,
    }


def predicted(case: Case, shape: str, delivered: float, device: str, unified: bool) -> dict[str, float] | None:
    """What the planner says of such a row on a box that reads `delivered` bytes a second; None for a made-up shape.

    Random weights route independently, so tokens choose among all experts, and the random MTP head is stored as the
    trunk is. The DFlash drafter counts as 16 bit here, as published; the one measured is INT4.
    """
    if shape == "tiny":
        return None
    model, scheme, fit = find_model(shape), find_scheme(SCHEMES[case.weights]), fitted()
    speed_gb = delivered / 1e9
    box = replace(
        box_of(0, 0, [Card(device, 0, 0)]),
        unified=unified,
        devices=1,
        bandwidth_gb_s=speed_gb,
        achievable_gb_s=speed_gb,
    )
    speed = predict(
        model, WeightBytes.of(model, replace(scheme, mtp="trunk")), box, parse_draft(case.draft),
        accepted=case.accept_length or 1.0, context=case.context, users=case.batch, engine="stoker",
        fit=replace(fit, values={**fit.values, "pool": 0.0, "pool:dflash": 0.0}),
    )  # fmt: skip
    return {
        "tokens_per_s": speed.tokens_per_s,
        "low": speed.low,
        "high": speed.high,
        "steps_per_s": 1.0 / speed.step_s,
        "bytes_per_step": speed.reads.total,
    }


def allowed_bytes(unified: bool) -> tuple[int, str]:
    """What may be taken, and how it was found. The driver's figure is misleading where the host's memory is shared:
    page cache counts as taken there, and nothing is left for the system."""
    if unified:
        reading = read_memory()
        said = f"MemAvailable {reading.available / GIB:.1f} GiB less {reading.reserve / GIB:.1f} for the system"
        return reading.available - reading.reserve, said
    free, _ = torch.cuda.mem_get_info()
    return free - CARD_RESERVE, f"{free / GIB:.1f} GiB free on the card less {CARD_RESERVE / GIB:.1f}"
