"""Every kernel compiles, without a GPU, for the boxes Stoker is for, and fits their shared memory.

`make test` compiles for one NVIDIA and one AMD target, `make test-all` for all of them and with the other Triton.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

LONG = pytest.mark.long
NVIDIA = ["sm_121", pytest.param("sm_90", marks=LONG)]
AMD = ["gfx1151", *(pytest.param(name, marks=LONG) for name in ("gfx1201", "gfx1100"))]


@pytest.mark.parametrize("name", [*NVIDIA, *AMD])
def test_kernels_fit(compiler, name: str) -> None:
    needs, limit = compiler(compiled, name)
    assert len(needs) == (38 if name.startswith("sm_") else 34)
    assert all(shared <= limit for shared, _ in needs.values()), needs


@pytest.mark.parametrize("name", NVIDIA)
def test_operands_go_straight_to_registers(compiler, name: str) -> None:
    """Shared memory holds the partial sums of the slices and no operand: that is what makes the kernels fast."""
    needs, _ = compiler(compiled, name)
    slices, columns = 4, 16
    partial_sums = slices * 16 * columns * 4
    products = [kernel for kernel in needs if kernel.startswith(("linear", "out", "head", "gate_up", "down"))]
    assert len(products) == 5
    assert all(needs[kernel][0] <= partial_sums for kernel in products), needs


@pytest.mark.parametrize("name", NVIDIA)
def test_nothing_spills_that_must_be_fast(compiler, name: str) -> None:
    needs, _ = compiler(compiled, name)
    spills = {kernel: spilled for kernel, (_, spilled) in needs.items()}
    assert all(spills[kernel] <= 64 for kernel in spills if not kernel.startswith("attention FP8")), spills


@pytest.mark.parametrize("name", NVIDIA)
def test_weights_and_states_are_asked_for_before_a_dependent_launch_waits(compiler, name: str) -> None:
    found = compiler(asked_for_before_the_wait, name)
    assert len(found) == 6
    assert all(loads > 0 for loads in found.values()), found


def asked_for_before_the_wait(target: str) -> dict[str, int]:
    """Loads of memory before a branch first waits, by kernel: the most of them where it waits in several branches."""
    found = {}
    for name, kernel in built_for(target).items():
        if name.split()[0] in ("linear", "out", "head", "route", "down", "deltanet"):
            branches = kernel.asm["ptx"].split("\n$L__BB")
            parts = [branch.partition("griddepcontrol.wait") for branch in branches]
            asked = [before.count("ld.global") for before, waits, _ in parts if waits]
            assert asked, f"{name} never waits"
            found[name] = max(asked)
    return found


@pytest.mark.parametrize("name", NVIDIA)
def test_a_shared_expert_waits_for_nothing_and_reads_past_the_first_level(compiler, name: str) -> None:
    """It starts before the router is done; what it reads was written by the launch before that one."""
    waits, past = compiler(waits_and_reads_of_gate_and_up, name)
    assert waits == 1, "of routed experts"
    assert past >= 5, "four quarters of a group of tokens, and the row for its norm"


def waits_and_reads_of_gate_and_up(target: str) -> tuple[int, int]:
    (text,) = (kernel.asm["ptx"] for name, kernel in built_for(target).items() if name.startswith("gate_up"))
    return text.count("griddepcontrol.wait"), text.count("ld.global.cg")


def compiled(name: str) -> tuple[dict[str, tuple[int, int]], int]:
    """Shared memory and spills of each kernel, by name, and the target's limit of shared memory."""
    from tools.compiled_kernels import TARGETS, needs_of

    target = TARGETS[name]
    found = {kernel: needs_of(compiled, target) for kernel, compiled in built_for(name).items()}
    return {kernel: (needs.shared, needs.spills or 0) for kernel, needs in found.items()}, target.shared_limit


@cache
def built_for(name: str) -> dict[str, Any]:
    """Triton's compiled kernels, by name."""
    from tools.compiled_kernels import TARGETS, built
    from tools.kernel_variants import each_kernel

    target = TARGETS[name]
    return {variant.name: built(variant, target) for variant in each_kernel(target.backend == "hip")}


@LONG
def test_the_triton_of_gpu_machines_compiles_them_too() -> None:
    """`make test-all` puts it there; kernels must not use what only the newest version has."""
    root = Path(__file__).parents[4]
    other = root / "build/triton-3.6.0"
    if not (other / ".ready").exists():
        pytest.skip(f"no Triton in {other}: `make test-all` and `make kernels` install it")
    command = [sys.executable, "-m", "benchmarks.gpu.kernel_table", "--small", "--no-parity", "--target", "sm_90"]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": str(other)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Triton 3.6.0" in done.stdout


@LONG
def test_sums_are_laid_out_alike_for_few_and_many_tokens(compiler) -> None:
    """A sum over a tile follows its layout, which the compiler chooses anew for every tile of tokens: the 1/rms of a
    row of 384 had other bits from nine tokens on."""
    assert compiler(layouts_of_sums, 384, 1) == compiler(layouts_of_sums, 384, 16)


def layouts_of_sums(hidden: int, tokens: int) -> dict[str, list[tuple[int, str]]]:
    """By kernel: axis and layout of every sum of more than two numbers, each once."""
    import re

    from tools.compiled_kernels import TARGETS, built
    from tools.kernel_variants import Shape, _experts, _linear, _route

    from stoker.backends.gpu.kernels import linear
    from stoker.backends.gpu.packed import Kind

    shape = Shape(hidden, 128, 512, 1552)
    head = _linear(shape, Kind.INT8, tokens, 4608, hidden, linear.BEST.value, "head")
    kernels = [_linear(shape, Kind.INT4, tokens), head, _route(shape, tokens)]
    found = {}
    for variant in [*kernels, *_experts(shape, tokens, Kind.INT4, Kind.FP8)]:
        text = built(variant, TARGETS["sm_90"]).asm["ttgir"]
        layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
        sums = set()
        for reduce in text.split('"tt.reduce"')[1:]:
            match = re.search(r"axis = (\d+).*?tensor<([\dx]+)x\w+, (#\w+)", reduce, re.DOTALL)
            assert match, reduce[:200]
            axis, sizes, layout = match.groups()
            adds = "arith.addf" in reduce.split("tt.reduce.return")[0]
            if adds and int(sizes.split("x")[int(axis)]) > 2:
                sums.add((int(axis), layouts[layout]))
        found[variant.name.split(" T=")[0]] = sorted(sums)
    return found


@LONG
def test_asynchronous_products_of_attention_take_keys_from_registers(compiler) -> None:
    """From shared memory that threads wrote some read wrong values on an H200; values of whole splits are copied there
    by hardware, from which none did. And keys of earlier steps are asked for before a dependent launch waits."""
    found = compiler(operands_in_shared_memory)
    assert len(found) == 5
    assert all(products > 0 and asked > 0 for products, _, asked in found.values()), found
    staged = {name: shared for name, (_, shared, _) in found.items() if shared}
    assert set(staged) == {"attention BF16 keys", "attention of a window"}
    assert all(shared * 2 == found[name][0] for name, shared in staged.items()), found


def operands_in_shared_memory() -> dict[str, tuple[int, int, int]]:
    """By kernel: asynchronous products, those whose first operand is no register, lines asked for before the wait."""
    import re

    found = {}
    for name, kernel in built_for("sm_90").items():
        if name.startswith("attention"):
            text = kernel.asm["ptx"]
            products = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (\{|%rd)", text)
            asked = text.rpartition("griddepcontrol.wait")[0].count("prefetch.global.L2")  # the first may be of idlers
            found[name] = len(products), products.count("%rd"), asked
    return found
