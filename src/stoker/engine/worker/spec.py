"""What an engine is made of, as plain data that goes to the process which builds it. Only building needs torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stoker.backends.progress import READING
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

        report(Loading(READING))
        file = self.directory / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(file)) if file.exists() else None  # for stop strings
        backend, drafter, notes = load_backend(
            self.directory,
            self.device,
            self.config,
            self.draft,
            lambda phase, done=0, total=0: report(Loading(phase, done, total)),
        )
        return Built(Engine(self.config, backend, drafter, tokenizer), notes)
