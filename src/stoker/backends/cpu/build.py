"""From a loaded model to what an engine runs on: its caches, and the drafter asked for."""

from pathlib import Path

from stoker.backends.cpu.backend import CpuBackend
from stoker.backends.cpu.draft_head import HeadChoice
from stoker.backends.cpu.drafting import CpuDFlash, CpuMtp
from stoker.backends.network.decoder import Decoder
from stoker.backends.network.load import load_drafter
from stoker.backends.network.low_bits import lower_all
from stoker.backends.progress import CACHES, DRAFTER, Report, silent
from stoker.engine.config import EngineConfig
from stoker.speculate.choice import DRAFTER_FOLDER, LIMITS, DraftChoice
from stoker.speculate.dflash import DFlashDrafter
from stoker.speculate.drafter import Drafter, combine
from stoker.speculate.lookup import LookupDrafter
from stoker.speculate.mtp import MtpDrafter

POSTPONE = 64  # tokens a drafting network may fall behind while the depth controller finds drafting not worth it


def cpu_backend(
    model: Decoder,
    engine: EngineConfig,
    draft: DraftChoice,
    directory: Path,
    report: Report = silent,
) -> tuple[CpuBackend, Drafter | None]:
    """Weights asked for in fewer bits replace those of the model's MTP head."""
    choice = draft.resolved(model.mtp is not None, directory)
    if choice.kinds:
        report(DRAFTER)
    network: CpuMtp | CpuDFlash | None = None
    drafters: list[Drafter] = []
    for kind in choice.kinds:
        depth = min(choice.depth, LIMITS[kind])
        if kind == "lookup":
            drafters.append(LookupDrafter(depth))
        elif kind == "mtp":
            network = _mtp(model, engine, choice)
            drafters.append(MtpDrafter(network, depth))
        else:
            network = _dflash(model, engine, choice, directory)
            drafters.append(DFlashDrafter(network, depth))
    report(CACHES)
    return CpuBackend(model, engine, network), combine(drafters)


def _mtp(model: Decoder, engine: EngineConfig, choice: DraftChoice) -> CpuMtp:
    assert model.mtp is not None
    if choice.weights:
        lower_all(model.mtp, choice.weights)
    return CpuMtp(model, engine.pages, engine.slots, HeadChoice(choice.vocab, choice.head), _postpone(choice))


def _dflash(model: Decoder, engine: EngineConfig, choice: DraftChoice, directory: Path) -> CpuDFlash:
    weight = model.embed_tokens.weight
    network = load_drafter(directory / DRAFTER_FOLDER, model.config, weight.dtype, weight.device)
    if choice.weights:
        lower_all(network, choice.weights)
    return CpuDFlash(model, network, engine.pages, HeadChoice(choice.vocab, choice.head), _postpone(choice))


def _postpone(choice: DraftChoice) -> int:
    return POSTPONE if choice.adaptive else 0
