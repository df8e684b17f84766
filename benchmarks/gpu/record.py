"""Everything docs/gpu.md says of a GPU, measured and checked anew by one command.

    PYTHONPATH=src:. python benchmarks/gpu/record.py [--out build/gpu-record] [--only decode,turn] [--list]

Runs that are timed come one after the other and have the GPU to themselves; checks come then, side by side, since most
of their time is compiling. Each leaves NAME.json, if it came to its end, and NAME.txt with all it printed.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.kernels import chosen

SHAPES = {"122b": "qwen3.5-122b-a10b", "35b": "qwen3.5-35b-a3b"}
DECODE = "benchmarks/gpu/decode.py --weights int4,hybrid --runs 3"
KERNELS = ("experts int4", "experts hybrid", "experts nvfp4", "linear,head", "deltanet,attention")
SMALL = "--shape qwen3.5-35b-a3b --layers 4 --weights hybrid --batch 1,3 --draft none,mtp:2 --accept-length 2.6"


@dataclass(frozen=True)
class Run:
    """A benchmark in a process of its own; `words` follow `python`, and a file for the result follows them."""

    name: str
    words: Sequence[str]
    seconds: int = 300  # most that it may take
    before: Sequence[str] = ()  # a program that runs it
    variables: dict[str, str] = field(default_factory=dict)

    def command(self, out: Path) -> list[str]:
        target = ["--json", str(out / f"{self.name}.json")]
        if "benchmarks.lossless" in self.words:
            target[0] = "--out"
        elif "benchmarks.gpu.box_report" in self.words:
            target = ["--out", str(out)]
        return [*self.before, sys.executable, *self.words, *target]


def timed_runs() -> list[Run]:
    drafts = "--draft none,mtp:2 --accept-length 2.6"
    lines = {
        "decode-contexts": f"{DECODE} --batch 1 --context 128,32768,131072,262144 --draft none --no-check",
        "decode-batches": f"{DECODE} --batch 1,2,4 --context 128 {drafts}",
        "decode-operations": f"{DECODE} --batch 1 --context 128 --draft none --no-check --operations",
        "decode-nvfp4": "benchmarks/gpu/decode.py --weights nvfp4 --batch 1,4 --context 128 --draft none --runs 3",
        "decode-dflash": "benchmarks/gpu/decode.py --batch 1 --context 128 --draft dflash:12 --accept-length 9.3",
        "prefill": "benchmarks/gpu/prefill.py --tokens 4096,32768,100000 --no-check --runs 2",
        "turn": "benchmarks/gpu/turn.py --context 0,8192,32768,100000",
        "soak": "benchmarks/gpu/soak.py --steps 2000",
        "box-report": "-m benchmarks.gpu.box_report",
    }
    return [Run(name, line.split(), 900 if name == "box-report" else 300) for name, line in lines.items()]


def check_runs() -> list[Run]:
    few = {"OMP_NUM_THREADS": "2"}  # they share the processor: more threads would only wait for each other
    lossless = "-m benchmarks.lossless --device cuda --prompts 20 --tokens 64 --jobs 6"
    runs = [
        Run("lossless", lossless.split(), 900),
        Run("agreement", ["-m", "benchmarks.gpu.agreement"], 600, variables=few),
    ]
    for short, shape in SHAPES.items():
        runs += [
            Run(
                f"checks-{short}-{words.replace(',', '-').replace(' ', '-')}",
                ["benchmarks/gpu/kernels.py", "--no-times", "--shape", shape, "--only", words],
                variables=few,
            )
            for words in KERNELS
        ]
        prefill = ["benchmarks/gpu/prefill.py", "--shape", shape, "--layers", "8", "--tokens", "512", "--runs", "1"]
        runs.append(Run(f"checks-{short}-prefill", prefill, variables=few))
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer:
        line = f"benchmarks/gpu/decode.py {SMALL} --steps 3 --runs 1 --no-check"
        before = [sanitizer, "--tool", "memcheck", "--error-exitcode", "1"]
        runs.append(Run("sanitizer", line.split(), before=before))
    return runs


def perform(run: Run, out: Path, running: set[subprocess.Popen[bytes]]) -> bool:
    """Whether it ended well. One that takes too long is ended with all its processes. It is in `running` meanwhile."""
    start = time.monotonic()
    printed = out / f"{run.name}.txt"
    with printed.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            run.command(out),
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **run.variables},
            start_new_session=True,
        )
        running.add(process)
        try:
            process.wait(run.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        finally:
            if process.returncode is not None:  # else Ctrl-C, and whoever began it ends all that are left
                running.discard(process)
    took, end = time.monotonic() - start, f"exit status {process.returncode}"
    if process.returncode == -signal.SIGKILL and took >= run.seconds:
        end = f"ended after its {run.seconds} s"
    if process.returncode:
        lines = [line for line in printed.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        end += f": {lines[-1][:200]}" if lines else ""
    print(f"{run.name:30} {took:5.0f} s  {end if process.returncode else 'ok'}", flush=True)
    return process.returncode == 0


def perform_all(timed: Sequence[Run], checks: Sequence[Run], out: Path, jobs: int) -> list[bool]:
    """Whether each ended well: timed ones in turn, checks `jobs` at a time. After Ctrl-C none is left."""
    running: set[subprocess.Popen[bytes]] = set()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            well = [perform(run, out, running) for run in timed]
            return well + list(pool.map(lambda run: perform(run, out, running), checks))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in [*running]:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            raise


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-record"), help="folder of the results")
    parser.add_argument("--only", metavar="WORDS", default="", help="runs whose name has one of these")
    parser.add_argument("--jobs", type=int, default=8, help="checks side by side (%(default)s)")
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    options = parser.parse_args(arguments)
    names = [run.name for run in [*timed_runs(), *check_runs()]]
    wanted = chosen(names, options.only)
    if not wanted:
        parser.error(f"no run has one of '{options.only}' in its name; there are {', '.join(names)}.")
    timed, checks = ([run for run in runs if run.name in wanted] for runs in (timed_runs(), check_runs()))
    if options.list:
        for run in [*timed, *checks]:
            print(f"{run.name:30} {shlex.join([*run.before, 'python', *run.words])}")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    well = perform_all(timed, checks, options.out, options.jobs)
    print(f"{sum(well)} of {len(well)} ended well; results are in {options.out}")
    if not all(well):
        sys.exit(1)


if __name__ == "__main__":
    main()
