"""What an engine is made of, as plain data that goes to the process which builds it. Only building needs torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stoker.engine.worker.messages import Loading
from stoker.speculate.choice import DraftChoice

if TYPE_CHECKING:
    from stoker.engine.config import EngineConfig
    from stoker.engine.engine import Engine


@dataclass(frozen=True)
class Built:
    engine: "Engine"
    notes: Sequence[str] = ()  # for the user: what was not used of the checkpoint, and why


class Buildable(Protocol):
    """Anything that pickles and can make an engine where it arrives."""

    def build(self, report: Callable[[Loading], None]) -> Built: ...


@dataclass(frozen=True)
class EngineSpec:
    """An engine on a checkpoint directory."""

    directory: Path
    config: "EngineConfig"
    draft: DraftChoice
    device: str = "cpu"

    def build(self, report: Callable[[Loading], None]) -> Built:
        from tokenizers import Tokenizer

        from stoker.backends.build import load_backend
        from stoker.engine.engine import Engine

        report(Loading("weights"))
        file = self.directory / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(file)) if file.exists() else None  # for stop strings
        backend, drafter, notes = load_backend(
            self.directory,
            self.device,
            self.config,
            self.draft,
            report=lambda phase: report(Loading(phase)),
            progress=_phases(report),
        )
        return Built(Engine(self.config, backend, drafter, tokenizer), notes)


def _phases(report: Callable[[Loading], None]) -> Callable[[int, int], None]:
    """`load_model` reads all weights, then packs them where the backend wants that."""
    phase = "weights"

    def progress(done: int, total: int) -> None:
        nonlocal phase
        report(Loading(phase, done, total))
        if done == total:
            phase = "packing"

    return progress
