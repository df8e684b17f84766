"""Compiles kernels without a GPU, for the boxes Stoker is for, and reads what they need of one."""

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

KB = 1024


@dataclass(frozen=True)
class Target:
    backend: str
    architecture: int | str
    shared_limit: int  # bytes a program may have

    @property
    def name(self) -> str:
        return f"sm_{self.architecture}" if self.backend == "cuda" else str(self.architecture)


TARGETS = {
    target.name: target
    for target in (
        Target("cuda", 90, 227 * KB),
        Target("cuda", 121, 99 * KB),
        Target("hip", "gfx1151", 64 * KB),
        Target("hip", "gfx1201", 64 * KB),
        Target("hip", "gfx1100", 64 * KB),
    )
}


@dataclass(frozen=True)
class Variant:
    """A kernel with the constants of one launch; `types` of its other arguments, pointers to int32 where not named."""

    name: str
    kernel: Any
    values: dict[str, Any]
    types: dict[str, str]
    amd: dict[str, Any] = field(default_factory=dict)  # what differs there
    little: dict[str, Any] = field(default_factory=dict)  # what differs on NVIDIA where shared memory is 99 KB


@dataclass(frozen=True)
class Needs:
    """None where the compiler does not say."""

    shared: int
    registers: int | None
    spills: int | None  # registers on AMD, bytes on NVIDIA
    warps: int


def compile_for(variant: Variant, target: Target) -> Needs:
    return needs_of(built(variant, target), target)


def needs_of(compiled: Any, target: Target) -> Needs:
    """What Triton's compiled kernel needs."""
    nvidia = target.backend == "cuda"
    registers, spills = _nvidia(compiled.asm["cubin"]) if nvidia else _amd(compiled.asm["amdgcn"])
    return Needs(int(compiled.metadata.shared), registers, spills, int(compiled.metadata.num_warps))


def built(variant: Variant, target: Target) -> Any:
    """Triton's compiled kernel: `asm` has it at every stage."""
    kernel, nvidia = variant.kernel, target.backend == "cuda"
    values = dict(variant.values)
    if not nvidia:
        values.pop("maxnreg", None)
        values |= variant.amd
    elif target.shared_limit < 128 * KB:
        values |= variant.little
    if "PTX" in values:
        values["PTX"] = nvidia
    if "PDL" in values:
        values["PDL"] = nvidia
    constants = {name: value for name, value in values.items() if name in kernel.arg_names}
    options = {name: value for name, value in values.items() if name not in constants}
    if nvidia and constants.get("PDL"):
        options["launch_pdl"] = True
    signature = {
        name: "constexpr" if name in constants else variant.types.get(name, "*i32" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name.endswith("_ptr")}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget(target.backend, target.architecture, 32), options=options)


def _nvidia(cubin: bytes) -> tuple[int | None, int | None]:
    """From the disassembler that Triton brings along."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (None, None)


def _amd(assembly: str) -> tuple[int | None, int | None]:
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly)
    return (int(registers[1]) if registers else None), (int(spills[1]) if spills else None)
