"""Every step kernel on every architecture: registers, shared memory, spills, parity. No GPU is needed.

    python -m benchmarks.gpu.kernel_table [--target sm_90,gfx1151] [--json FILE]

Compiles with the Triton that is installed. Parity is that of the interpreter tests, which this runs first. AMD's
numbers are of code that was compiled and never run.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tools.compiled_kernels import TARGETS, Needs, compile_for
from tools.kernel_variants import each_kernel, every_variant

# kernel -> the test file that compares it with its reference in the interpreter, seen from TESTS
PARITY = {
    "linear": "test_linear.py",
    "out": "test_linear.py",
    "head": "test_linear.py",
    "best": "test_linear.py",
    "route": "test_experts.py",
    "tiles": "test_experts.py",
    "gate_up": "test_experts.py",
    "down": "test_experts.py",
    "deltanet": "test_deltanet.py",
    "attention": "test_attention.py",
    "join": "test_attention.py",
    "begin": "test_rows.py",
    "mtp_inputs": "test_rows.py",
    "accept": "../../../benchmarks/gpu/test_device_loop.py",
    "advance": "../../../benchmarks/gpu/test_device_loop.py",
    "remember": "../test_dflash.py",
    "swiglu": "../test_dflash.py",
    "prefill_linear": "test_prefill_products.py",
    "unpack": "test_prefill_products.py",
    "prefill_gate_up": "test_prefill_products.py",
    "prefill_down": "test_prefill_products.py",
    "count": "test_prefill_products.py",
    "pair_tiles": "test_prefill_products.py",
    "conv": "test_prefill_deltanet.py",
    "prepare": "test_prefill_deltanet.py",
    "scan": "test_prefill_deltanet.py",
    "gate": "test_prefill_deltanet.py",
    "write": "test_prefill_attention.py",
    "prefill_attention": "test_prefill_attention.py",
    "norm": "test_prefill_rows.py",
    "combine": "test_prefill_rows.py",
    "choose": "test_prefill_rows.py",
}
TESTS = Path(__file__).parents[2] / "tests/backends/gpu/kernels"


def parity() -> dict[str, bool]:
    """Which of the interpreter tests pass."""
    found = {}
    for file in track(sorted(set(PARITY.values())), "interpreting", transient=True):
        command = [sys.executable, "-m", "pytest", "-q", "-x", str(TESTS / file)]
        found[file] = subprocess.run(command, capture_output=True).returncode == 0
    return found


def cell(needs: Needs | str) -> str:
    if isinstance(needs, str):
        return needs
    spills = f" [red]{needs.spills}[/red]" if needs.spills else " 0"
    return f"{needs.registers} {needs.shared / 1024:.1f}{spills}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=",".join(TARGETS), help="architectures, by comma")
    parser.add_argument("--small", action="store_true", help="each kernel once at small sizes: minutes less")
    parser.add_argument(
        "--parity", action=argparse.BooleanOptionalAction, default=True, help="run the interpreter tests"
    )
    parser.add_argument("--json", metavar="FILE", help="write the numbers here too")
    options = parser.parse_args()
    targets = [TARGETS[name] for name in options.target.split(",")]
    held = parity() if options.parity else {}
    variants = each_kernel() if options.small else every_variant()
    rows: list[dict[str, Any]] = []
    failed = [f"parity of {file}" for file, good in held.items() if not good]
    table = Table(title=f"Triton {triton.__version__}: registers, shared memory in KB, spills (bytes; AMD: registers)")
    table.add_column("kernel")
    for target in targets:
        table.add_column(target.name, justify="right")
    table.add_column("parity")
    for variant in track(variants, "compiling", transient=True):
        cells = []
        for target in targets:
            try:
                needs: Needs | str = compile_for(variant, target)
            except Exception as failure:  # shown in the table, and the command fails
                needs = "[red]fails[/red]"
                failed.append(f"{variant.name} for {target.name}: {failure!r}"[:300])
            if isinstance(needs, Needs):
                rows.append({"kernel": variant.name, "target": target.name, **vars(needs)})
                if needs.shared > target.shared_limit:
                    failed.append(
                        f"{variant.name} has {needs.shared} bytes shared, {target.name} {target.shared_limit}"
                    )
            cells.append(cell(needs))
        file = PARITY[variant.name.split()[0]]
        table.add_row(variant.name, *cells, {True: "ok", False: "[red]FAILS[/red]", None: "not run"}[held.get(file)])
    Console(width=40 + 16 * len(targets)).print(table)
    if options.json:
        Path(options.json).write_text(json.dumps({"triton": triton.__version__, "rows": rows}, indent=1) + "\n")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
