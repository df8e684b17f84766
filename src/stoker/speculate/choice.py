"""The value of `--draft`: which drafter, how deep, how cheap. Parsed without torch; built once the model is there.

none                        no drafts
mtp:2, lookup+dflash:12     that drafter, always that deep
mtp:auto, auto              depth chosen each step; a bare `auto` takes the best drafter the checkpoint has
mtp:2,vocab=2048,head=int4  drafts from fewer tokens and bits of the head; ,weights=int8 for the drafting network
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stoker.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from stoker.backends.cpu.decoder import Decoder
    from stoker.speculate.drafter import Drafter

FORMS = "none, auto, or mtp:K, dflash:K, lookup:K, lookup+mtp:K or lookup+dflash:K with a number or auto for K"
LIMITS = {"mtp": 8, "dflash": 15, "lookup": 16}  # deepest K of each
PAIRS = (("mtp",), ("dflash",), ("lookup",), ("lookup", "mtp"), ("lookup", "dflash"))
DRAFTER_FOLDER = "drafter"  # of a checkpoint directory, where `stoker build` puts a DFlash network
POSTPONE = 64  # tokens a drafter may fall behind while the depth controller finds drafting not worth it
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

    def build(self, model: "Decoder", directory: Path, pages: int, slots: int) -> "Drafter | None":
        """The drafter for an engine with that many pages and slots."""
        choice = self.resolved(model, directory)
        built = [choice._build(kind, model, directory, pages, slots) for kind in choice.kinds]
        if len(built) == 2:
            from stoker.speculate.combine import FirstOf

            return FirstOf(built[0], built[1])
        return built[0] if built else None

    def resolved(self, model: "Decoder", directory: Path) -> "DraftChoice":
        """With `kinds` read off the checkpoint where that is still to do. Lookup is always there; a DFlash network
        comes before the MTP head, since its depth costs one pass."""
        if not self.best:
            return self
        if (directory / DRAFTER_FOLDER).is_dir():
            kinds: tuple[str, ...] = ("lookup", "dflash")
        else:
            kinds = ("lookup", "mtp") if model.mtp is not None else ("lookup",)
        return replace(self, kinds=kinds, best=False)

    def expect(self, kind: str, model: "Decoder", directory: Path) -> None:
        """Refuses a drafter that the checkpoint does not have."""
        if kind == "mtp" and model.mtp is None:
            raise CheckpointError(
                f"{directory} has no MTP head (no mtp.* tensors); draft with lookup:{self.depth}, "
                "or add the head with stoker build --mtp."
            )
        folder = directory / DRAFTER_FOLDER
        if kind == "dflash" and not folder.is_dir():
            raise CheckpointError(
                f"{folder} does not exist: a DFlash network lies there; draft with mtp:{min(self.depth, 2)}, "
                "or add it with stoker build --drafter."
            )

    def _build(self, kind: str, model: "Decoder", directory: Path, pages: int, slots: int) -> "Drafter":
        depth = min(self.depth, LIMITS[kind])
        self.expect(kind, model, directory)
        if kind == "lookup":
            from stoker.speculate.lookup import LookupDrafter

            return LookupDrafter(depth)
        from stoker.speculate.draft_head import HeadChoice
        from stoker.speculate.low_bits import lower_all

        head = HeadChoice(self.vocab, self.head)
        postpone = POSTPONE if self.adaptive else 0
        if kind == "mtp":
            from stoker.speculate.mtp import MtpDrafter

            assert model.mtp is not None
            if self.weights:
                lower_all(model.mtp, self.weights)
            return MtpDrafter(model, pages, slots, depth, head, postpone)
        from stoker.backends.cpu.load import load_drafter
        from stoker.speculate.dflash import DFlashDrafter

        folder = directory / DRAFTER_FOLDER
        network = load_drafter(folder, model.config, model.embed_tokens.weight.dtype, model.embed_tokens.weight.device)
        if self.weights:
            lower_all(network, self.weights)
        return DFlashDrafter(model, network, pages, depth, head, postpone)
