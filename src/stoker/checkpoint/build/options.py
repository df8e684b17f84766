"""The options of `stoker build`, checked against each other before any file is opened."""

import re
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from stoker.errors import StokerError

HUB = "hf:"
FP8 = "fp8"  # as --shared-experts: quantise the base's own
MIB = 1 << 20
SHARD_BYTES = 4 << 30
MEMORY = 1 << 30
SMALLEST_MEMORY = 512 * MIB  # the runtime itself and one block of the largest layer


class OptionsError(StokerError):
    """Options of `stoker build` that are invalid or contradict each other."""


@dataclass(frozen=True)
class Scheme:
    """The formats that `--quantize` stands for; an empty string leaves a group in 16 bit."""

    projections: str  # routed experts, dense MLPs, attention and DeltaNet projections
    shared_experts: str = ""
    head: str = ""
    drafts: str = ""  # experts and projections of the MTP head and of the drafter


SCHEMES = {
    "int4": Scheme("int4-g128"),
    "int4-g64": Scheme("int4-g64"),
    "int4-g32": Scheme("int4-g32"),
    "hybrid": Scheme("int4-g128", "fp8-b128", "int8-row"),
    "hybrid-g64": Scheme("int4-g64", "fp8-b128", "int8-row"),
    "hybrid-g32": Scheme("int4-g32", "fp8-b128", "int8-row"),
    "fp8": Scheme("fp8-b128", "fp8-b128"),
}
DRAFT_WEIGHTS = {"int4": "int4-g128", "int4-g64": "int4-g64", "int4-g32": "int4-g32"}
EXPORTS = {"bf16": "BF16", "fp32": "F32"}  # --to -> dtype


@dataclass(frozen=True)
class BuildOptions:
    """Everything that decides the bytes of the result, which output directory and memory limit do not."""

    base: str
    shared_experts: str = ""  # a directory, hf:REPO[@REVISION], or fp8
    lm_head: str = ""  # int8
    mtp: str = ""  # a directory or hf:REPO[@REVISION]
    drafter: str = ""  # likewise
    quantize: str = ""  # one of SCHEMES
    to: str = ""  # one of EXPORTS
    shard_bytes: int = SHARD_BYTES
    draft_weights: str = ""  # one of DRAFT_WEIGHTS

    def check(self) -> None:
        if self.base.startswith(HUB):
            name = self.base.removeprefix(HUB)
            raise OptionsError(
                f"--base takes a directory, since all of it is copied; fetch it first: "
                f"hf download {name} --local-dir DIR"
            )
        _one_of("--lm-head", self.lm_head, ("int8",))
        _one_of("--quantize", self.quantize, tuple(SCHEMES))
        _one_of("--to", self.to, tuple(EXPORTS))
        _one_of("--draft-weights", self.draft_weights, tuple(DRAFT_WEIGHTS))
        if self.shared_experts == FP8 and Path(FP8).is_dir():
            raise OptionsError(
                "--shared-experts fp8 quantises the base's own, and there is also a directory of that name here; "
                "write ./fp8 to take it from there, or start from another directory."
            )
        if self.to:
            for option, value in (
                ("--quantize", self.quantize),
                ("--lm-head", self.lm_head),
                ("--draft-weights", self.draft_weights),
                ("--shared-experts fp8", self.shared_experts == FP8),
            ):
                if value:
                    raise OptionsError(
                        f"--to {self.to} turns every weight back into {self.to}, so {option} has nothing to do; "
                        "build the quantised checkpoint first and export that one."
                    )
        if self.shard_bytes < 1:
            raise OptionsError(f"--shard-size is {self.shard_bytes} bytes, expected at least 1.")

    @property
    def scheme(self) -> Scheme:
        """What this build quantises: --quantize, and the options that quantise a single group."""
        chosen = SCHEMES.get(self.quantize, Scheme(""))
        # layers from another checkpoint keep the format they have there
        shared = "fp8-b128" if self.shared_experts == FP8 else "" if self.shared_experts else chosen.shared_experts
        head = "int8-row" if self.lm_head else chosen.head
        return Scheme(chosen.projections, shared, head, DRAFT_WEIGHTS.get(self.draft_weights, ""))

    def as_dict(self) -> dict[str, str | int]:
        return asdict(self)

    def command(self) -> str:
        """The command line without --out: the result may be moved."""
        words = ["stoker", "build"]
        for field, value in self.as_dict().items():
            if value and field != "shard_bytes":
                words += [f"--{field.replace('_', '-')}", str(value)]
        if self.shard_bytes != SHARD_BYTES:
            words += ["--shard-size", str(self.shard_bytes)]
        return shlex.join(words)


_UNITS = {"": 1, "b": 1, **{f"{p}b": 1000**n for n, p in enumerate("kmgt", 1)}}
_UNITS |= {f"{p}ib": 1024**n for n, p in enumerate("kmgt", 1)}


def parse_bytes(text: str, option: str) -> int:
    """ "1GiB", "512 MiB", "4GB" or a number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not match or match[2].lower() not in _UNITS:
        raise OptionsError(f"{option} is {text!r}, expected a size such as 1GiB, 512MiB or 4GB.")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def show_bytes(count: int) -> str:
    """In decimal units, as disks and downloads are: "0.45 GB", "12 MB"."""
    if count >= 10**8:
        return f"{count / 1e9:,.2f} GB"
    return f"{count / 1e6:,.1f} MB" if count >= 10**5 else f"{count / 1e3:,.1f} kB"


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value and value not in allowed:
        raise OptionsError(f"{option} is {value!r}, expected {' or '.join(allowed)}.")
