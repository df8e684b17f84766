"""The value of `--draft`: which drafter, how deep. Parsed without torch; built once the model is there."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from stoker.model.decoder import Decoder
    from stoker.speculate.drafter import Drafter

FORMS = "none, mtp:K, dflash:K, lookup:K, lookup+mtp:K or lookup+dflash:K"
LIMITS = {"mtp": 8, "dflash": 15, "lookup": 16}  # deepest K of each
DRAFTER_FOLDER = "drafter"  # of a checkpoint directory, where `stoker build` puts a DFlash network


@dataclass(frozen=True)
class DraftChoice:
    kinds: tuple[str, ...]  # in the order they are asked
    depth: int

    @classmethod
    def parse(cls, text: str) -> "DraftChoice":
        if text == "none":
            return cls((), 0)
        names, _, number = text.partition(":")
        kinds = tuple(names.split("+"))
        known = kinds in (("mtp",), ("dflash",), ("lookup",), ("lookup", "mtp"), ("lookup", "dflash"))
        if not known or not number.isdigit():
            raise RequestError(f"--draft is {text!r}, expected {FORMS}.")
        depth, limit = int(number), LIMITS[kinds[-1]]
        if not 1 <= depth <= limit:
            raise RequestError(f"--draft is {text!r}: {kinds[-1]} drafts 1 to {limit} tokens a step, not {depth}.")
        return cls(kinds, depth)

    def build(self, model: "Decoder", directory: Path, pages: int, slots: int) -> "Drafter | None":
        """The drafter for an engine with that many pages and slots."""
        built = [self._build(kind, model, directory, pages, slots) for kind in self.kinds]
        if len(built) == 2:
            from stoker.speculate.combine import FirstOf

            return FirstOf(built[0], built[1])
        return built[0] if built else None

    def _build(self, kind: str, model: "Decoder", directory: Path, pages: int, slots: int) -> "Drafter":
        if kind == "lookup":
            from stoker.speculate.lookup import LookupDrafter

            return LookupDrafter(self.depth)
        if kind == "mtp":
            from stoker.speculate.mtp import MtpDrafter

            if model.mtp is None:
                raise CheckpointError(
                    f"{directory} has no MTP head (no mtp.* tensors); draft with lookup:{self.depth}, "
                    "or add the head with stoker build --mtp."
                )
            return MtpDrafter(model, pages, slots, self.depth)
        from stoker.model.load import load_drafter
        from stoker.speculate.dflash import DFlashDrafter

        folder = directory / DRAFTER_FOLDER
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} does not exist: a DFlash network lies there; draft with mtp:{min(self.depth, 2)}, "
                "or add it with stoker build --drafter."
            )
        network = load_drafter(folder, model.config, model.embed_tokens.weight.dtype, model.embed_tokens.weight.device)
        return DFlashDrafter(model, network, pages, self.depth)
