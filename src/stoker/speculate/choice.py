"""The value of `--draft`: which drafter, how deep, how cheap. No torch: backends build it (`build.py` of each).

none                        no drafts
mtp:2, lookup+dflash:12     that drafter, always that deep
mtp:auto, auto              depth chosen each step; a bare `auto` takes the best drafter the checkpoint has
mtp:2,vocab=2048,head=int4  drafts from fewer tokens and bits of the head; ,weights=int8 for the drafting network
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from stoker.errors import CheckpointError, RequestError

FORMS = "none, auto, or mtp:K, dflash:K, lookup:K, lookup+mtp:K or lookup+dflash:K with a number or auto for K"
LIMITS = {"mtp": 8, "dflash": 15, "lookup": 16}  # deepest K of each
PAIRS = (("mtp",), ("dflash",), ("lookup",), ("lookup", "mtp"), ("lookup", "dflash"))
DRAFTER_FOLDER = "drafter"  # of a checkpoint directory, where `stoker build` puts a DFlash network
Bits = Literal[4, 8]
BITS: dict[str, Bits] = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class DraftChoice:
    kinds: tuple[str, ...]  # in the order they are asked
    depth: int  # most drafts a step
    adaptive: bool = False  # `depth` is a limit, and each step's own depth is chosen by the controller
    best: bool = False  # `kinds` are still to be read off the checkpoint
    vocab: int | None = None  # tokens of the head that drafts are made from; None: all
    head: Bits | None = None  # bits of the head that drafts are made from; None: as the model has it
    weights: Bits | None = None  # bits of the drafting network; None: as stored

    @classmethod
    def parse(cls, text: str) -> "DraftChoice":
        form, *options = text.split(",")
        choice = cls._parse_form(form, text)
        for option in options:
            choice = choice._with(option, text)
        return choice

    @classmethod
    def _parse_form(cls, form: str, text: str) -> "DraftChoice":
        if form == "none":
            return cls((), 0)
        if form == "auto":
            return cls((), max(LIMITS.values()), adaptive=True, best=True)
        names, _, number = form.partition(":")
        kinds = tuple(names.split("+"))
        if kinds not in PAIRS or not (number.isdecimal() or number == "auto"):
            raise RequestError(f"--draft is {text!r}, expected {FORMS}.")
        limit = LIMITS[kinds[-1]]
        if number == "auto":
            return cls(kinds, limit, adaptive=True)
        depth = int(number)
        if not 1 <= depth <= limit:
            raise RequestError(f"--draft is {text!r}: {kinds[-1]} drafts 1 to {limit} tokens a step, not {depth}.")
        return cls(kinds, depth)

    def _with(self, option: str, text: str) -> "DraftChoice":
        name, _, value = option.partition("=")
        if not self.best and (not self.kinds or self.kinds == ("lookup",)):
            raise RequestError(f"--draft is {text!r}: {name} is an option of mtp and dflash, which are not asked for.")
        if name == "vocab":
            if not value.isdecimal() or int(value) < 1:
                raise RequestError(f"--draft is {text!r}: vocab is {value!r}, expected a number of tokens.")
            return replace(self, vocab=int(value))
        if name in ("head", "weights"):
            if value not in BITS:
                raise RequestError(f"--draft is {text!r}: {name} is {value!r}, expected int8 or int4.")
            return replace(self, head=BITS[value]) if name == "head" else replace(self, weights=BITS[value])
        raise RequestError(f"--draft is {text!r}: {name!r} is unknown, expected vocab=N, head=int8 or weights=int8.")

    def resolved(self, mtp: bool, directory: Path) -> "DraftChoice":
        """With `kinds` read off the checkpoint where that is still to do; `mtp`: it has an MTP head. Lookup is always
        there; a DFlash network comes before the MTP head, since its depth costs one pass. Refuses a drafter that the
        checkpoint does not have."""
        folder = directory / DRAFTER_FOLDER
        if self.best:
            kind = ("dflash",) if folder.is_dir() else ("mtp",) if mtp else ()
            return replace(self, kinds=("lookup", *kind), best=False)
        if "mtp" in self.kinds and not mtp:
            raise CheckpointError(
                f"{directory} has no MTP head (no mtp.* tensors); draft with lookup:{self.depth}, "
                "or add the head with stoker build --mtp."
            )
        if "dflash" in self.kinds and not folder.is_dir():
            raise CheckpointError(
                f"{folder} does not exist: a DFlash network lies there; draft with mtp:{min(self.depth, 2)}, "
                "or add it with stoker build --drafter."
            )
        return self
