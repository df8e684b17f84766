"""`make box-report`: what this box does with Qwen3.5-122B shapes, in about ten minutes and without a download.

    make box-report                                  # with python3, which must have torch for this GPU
    make box-report PYTHON=/path/to/python ARGS='--layers 24'

Measures the memory's bandwidth, makes random weights on the GPU (as many layers as memory allows), decodes with and
without drafts, and leaves JSON and a text to post, in which nothing tells whose machine it is. Every row is kept as
soon as it is measured: Ctrl-C, a failing row or a fault of the GPU lose none of them. Exit status: 0; 1 where a row or
a check failed; 2 where nothing can be measured; 130 after Ctrl-C.
"""

import argparse
import datetime
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu import box_text
from stoker.errors import RequestError, StokerError

if TYPE_CHECKING:
    from benchmarks.gpu.box_rows import Case, Measuring

GIB = 1 << 30
SHAPES = ("qwen3.5-122b-a10b", "qwen3.5-35b-a3b")
STEPS, RUNS = 64, 3  # on a Spark some five minutes of steps (counted: bytes at 227 GB/s), and kernels to compile
Say = Callable[[str], None]


class GpuLost(Exception):
    """A fault ended the process's hold on the GPU: only a new process can go on."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default=SHAPES[0], choices=SHAPES)
    parser.add_argument("--layers", type=int, help="so many of them; as many as memory allows if not said")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run (%(default)s)")
    parser.add_argument("--runs", type=int, default=RUNS, help="the fastest counts (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder of box-report.json and .md (build)")
    parser.add_argument("--resume", action="store_true", help="go on with box-report.json: measure what it lacks")
    parser.add_argument("--dry-run", action="store_true", help="a tiny network, interpreted: tries the path, no speed")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.dry_run:  # before Triton is imported, which decides then
        os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    report: Report | None = None
    try:
        _usable(options.dry_run)
        report = Report(options)
        report.measure()
    except StokerError as mistake:
        print(mistake, file=sys.stderr)
        return 2
    except GpuLost:
        command = [sys.executable, "-m", "benchmarks.gpu.box_report", *arguments]
        os.execv(sys.executable, command if options.resume else [*command, "--resume"])
    except KeyboardInterrupt:
        if report:
            report.show()
        return 130
    report.show()
    return 1 if report.failed else 0


def _usable(dry: bool) -> None:
    """Raises with what is missing and how to name a Python that has it."""
    way = "Name one with: make box-report PYTHON=/path/to/python"
    try:
        import torch
        import triton  # noqa: F401

        if dry or (torch.cuda.is_available() and _shares_memory()):
            import psutil  # noqa: F401
    except ImportError as missing:
        raise RequestError(
            f"{sys.executable} has no {missing.name}: the box report needs a Python with torch for this GPU, and the "
            f"triton, numpy and, where memory is shared with the host, psutil it can import. {way}"
        ) from missing
    if not dry and not torch.cuda.is_available():
        raise RequestError(
            f"torch {torch.__version__} finds no GPU here, and without one there is no speed to report. If there is "
            f"one, this torch is not built for it. {way}; --dry-run tries the path without a GPU."
        )


def _shares_memory() -> bool:
    """Whether the GPU has the host's memory and none of its own."""
    import torch

    return bool(getattr(torch.cuda.get_device_properties(0), "is_integrated", False))


class Report:
    """Its file is written after every row."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import triton

        from benchmarks.gpu import weights as gpu_weights
        from benchmarks.gpu.box_rows import Case, Measuring, cases

        self.dry, self.path = options.dry_run, options.out / "box-report.json"
        shape, rows = options.shape, cases()
        if self.dry:
            shape, options.steps, options.runs = "tiny", 1, 1
            rows = [Case("hybrid", 1, "none", None, 8), Case("int4", 1, "mtp:1", 1.5, 8)]
        self.measuring = Measuring(shape, rows, options.steps, options.runs)
        self.config = gpu_weights.SHAPES[shape]
        self.unified, gpu = True, {"gpu": "none: interpreted on the processor", "gpu_memory": 0}
        if not self.dry:
            own = torch.cuda.get_device_properties(0)
            self.unified = _shares_memory()
            gpu = {"gpu": own.name, "gpu_memory": own.total_memory}
        old = self._old() if options.resume else {}
        layers, self.allowed = self._choose_layers(options.layers or old.get("layers"))
        self.content: dict[str, Any] = {
            "benchmark": "box_report",
            "date": datetime.date.today().isoformat(),
            "command": _command(options),
            "machine": {
                **gpu,
                "unified": self.unified,
                **box_text.host(),
                "torch": torch.__version__,
                "triton": triton.__version__,
            },
            "shape": shape,
            "layers": layers,
            "all_layers": len(self.config.layer_types),
            "steps": options.steps,
            "runs": options.runs,
            "planned_rows": len(rows),
            "bandwidth": {},
            "checks": {},
            "rows": [],
        }
        if old:
            self._take_over(old)

    @property
    def failed(self) -> bool:
        rows, checks = self.content["rows"], self.content["checks"]
        return any("error" in row for row in rows) or not all(box_text.passed(check) for check in checks.values())

    def measure(self) -> None:
        from benchmarks.gpu.decode import host_bandwidth
        from benchmarks.gpu.timing import bandwidth

        waiting = self._waiting()
        formats = dict.fromkeys(case.weights for case in waiting)
        with box_text.progress(1 + len(waiting) + (1 if self.dry else 2) * len(formats)) as (now, say):
            now("bandwidth of the memory")
            if not self.content["bandwidth"]:
                large = 4 if self.allowed > 12 * GIB else 1
                self.content["bandwidth"] = host_bandwidth() if self.dry else bandwidth(large)
                self._write()
            delivered = self.content["bandwidth"]
            say(f"reads {delivered['read'] / 1e9:,.1f} GB/s, copies {delivered['copy'] / 1e9:,.1f} GB/s")
            for weights in formats:
                self._measure_format(weights, [case for case in waiting if case.weights == weights], now, say)

    def _measure_format(self, weights: str, waiting: "list[Case]", now: Say, say: Say) -> None:
        import torch

        from benchmarks.gpu.decode import check_step

        layers = self.content["layers"]
        now(f"{weights}: random weights of {layers} layers")
        _give_back_memory()
        torch.manual_seed(0)
        try:
            network = self.measuring.network(weights, layers, "cpu" if self.dry else "cuda")
            if not self.dry:
                now(f"{weights}: check of bits; the first kernels are compiled")
                if weights not in self.content["checks"]:
                    self.content["checks"][weights] = check_step(network.config, network.trunk, 4)
        except Exception as failure:
            for case in waiting:
                self._add(case, _failure(failure), say)
            self._still_there()
            return
        for case in waiting:
            now(str(case))
            try:
                found = self.measuring.measure(case, network, self.content["bandwidth"])
            except Exception as failure:
                found = _failure(failure)
            self._add(case, found, say)
            self._still_there()
            _give_back_memory()

    def _add(self, case: "Case", found: dict[str, Any], say: Say) -> None:
        from benchmarks.gpu.box_rows import predicted

        best = max(self.content["bandwidth"].values())
        said = predicted(case, self.content["shape"], best, self.content["machine"]["gpu"], self.unified)
        row = {**case.key, **found, "predicted": said}
        self.content["rows"].append(row)
        self._write()
        say(box_text.line(row))

    def _still_there(self) -> None:
        import torch

        if not self.dry:
            try:
                torch.cuda.synchronize()
            except Exception as fault:
                raise GpuLost from fault

    def _waiting(self) -> "list[Case]":
        done = self.content["rows"]
        return [case for case in self.measuring.rows if not any(case.key.items() <= row.items() for row in done)]

    def _choose_layers(self, asked: int | None) -> tuple[int, int]:
        """How many, and the bytes that may be taken, which torch is held to: it then refuses before the host swaps."""
        import torch

        from benchmarks.gpu.box_rows import allowed_bytes

        allowed, said = allowed_bytes(self.unified)
        layers = choose_layers(self.measuring, asked, allowed, said)
        if not self.dry:
            torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / torch.cuda.mem_get_info()[1]))
        return layers, allowed

    def _old(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text())
            if found["benchmark"] == "box_report":
                return found
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise RequestError(f"--resume: {self.path} is no report to go on with; run without it.")

    def _take_over(self, old: dict[str, Any]) -> None:
        """What was measured, unless it was measured otherwise."""
        names = ("shape", "layers", "steps", "runs")
        pairs = {name: (old[name], self.content[name]) for name in names}
        pairs["GPU"] = old["machine"]["gpu"], self.content["machine"]["gpu"]
        for name, (was, now) in pairs.items():
            if was != now:
                raise RequestError(f"--resume: {self.path} has {name} {was} and this run {now}; run without --resume.")
        self.content |= {name: old[name] for name in ("bandwidth", "checks", "rows")}

    def _write(self) -> None:
        """Whole or not at all, whenever the power goes."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1) + "\n")
        part.replace(self.path)

    def show(self) -> None:
        if not self.content["bandwidth"]:
            print("Nothing was measured.")
            return
        text = box_text.post(self.content)
        self.path.with_suffix(".md").write_text(text)
        box_text.show(self.content)
        print(f"\n--- ready to post, also in {self.path.with_suffix('.md')}; all figures in {self.path} ---\n\n{text}")


def _command(options: argparse.Namespace) -> str:
    """What repeats this report, without folders."""
    if options.dry_run:
        return "make box-report ARGS=--dry-run"
    asked = {"shape": SHAPES[0], "layers": None, "steps": STEPS, "runs": RUNS}
    said = [f"--{name} {getattr(options, name)}" for name, usual in asked.items() if getattr(options, name) != usual]
    return "make box-report" + (f" ARGS='{' '.join(said)}'" if said else "")


def choose_layers(measuring: "Measuring", asked: int | None, allowed: int, said: str) -> int:
    """Those asked for, or the most of which random weights fit."""
    from benchmarks.gpu import weights as gpu_weights
    from benchmarks.gpu.box_rows import possible_layers

    possible = possible_layers(gpu_weights.SHAPES[measuring.shape])
    if asked and asked not in possible:
        raise RequestError(
            f"--layers {asked} cannot be measured: kinds of layers repeat, and what one takes is a difference. "
            f"Possible are {', '.join(map(str, possible))}."
        )
    candidates = [asked] if asked else possible
    for layers in candidates:
        if (needed := measuring.needed_bytes(layers)) <= allowed:
            return layers
    raise RequestError(
        f"{layers} layers of {measuring.shape} need {needed / GIB:.1f} GiB and {max(0, allowed) / GIB:.1f} may be "
        f"taken ({said}). Free some memory, "
        + ("leave --layers out to measure as many as fit." if asked else f"or measure --shape {SHAPES[1]}.")
    )


def _failure(failure: Exception) -> dict[str, Any]:
    """Where it happened, by names of files alone: folders carry the owner's name."""
    frames = traceback.extract_tb(failure.__traceback__)
    return {
        "error": box_text.without_paths(f"{type(failure).__name__}: {failure}".strip().split("\n")[0]),
        "trace": [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames],
    }


def _give_back_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        try:
            torch.cuda.empty_cache()
        except Exception as fault:
            raise GpuLost from fault


if __name__ == "__main__":
    sys.exit(main())
