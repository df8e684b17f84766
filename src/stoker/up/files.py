"""The files a recipe is served from: fetched, built and looked at, each only as far as that has not been done."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.demo import NAME, checkpoint_at
from stoker.errors import StokerError
from stoker.recipes.load import Loaded, is_remote
from stoker.recipes.recipe import Files
from stoker.up.fetch import Report, fetch
from stoker.up.receipt import Revision

if TYPE_CHECKING:
    from stoker.up.hub_cache import HubCache


class NotUsable(StokerError):
    """A checkpoint that the engine could not serve."""


@dataclass(frozen=True)
class Here:
    """Files on disk."""

    path: Path
    revision: Revision


def source(loaded: Loaded, files: Files) -> str:
    """Paths are meant from the recipe's folder."""
    if is_remote(files) or files.source == NAME:
        return files.source
    return str(loaded.folder / Path(files.source).expanduser())


def fetch_files(loaded: Loaded, what: str, files: Files, progress: Report) -> tuple[Here, str]:
    """And a note that the user should see."""
    found = fetch(source(loaded, files), files.revision if is_remote(files) else None, files.sha256, None, progress)
    return Here(found.path, Revision(what, files.source, found.revision, found.bytes)), found.note


def on_disk(loaded: Loaded, files: Files) -> Path | None:
    """Where the files lie, if they are there already."""
    if not is_remote(files):
        path = checkpoint_at(source(loaded, files))
        return path if path.is_dir() else None
    cache = _cache(files)
    found = cache.find(_revision(files)) if cache else None
    return found[1] if found else None


def missing(loaded: Loaded) -> list[str]:
    """Folders that the recipe names and that are not there, as sentences."""
    wanted = [each for each in (loaded.recipe.model, loaded.recipe.drafter) if each and not is_remote(each)]
    paths = [checkpoint_at(source(loaded, each)) for each in wanted]
    said = "there is no directory {}; a repository of a hub is written as hf:OWNER/NAME."
    return [said.format(path) for path in paths if not path.is_dir()]


def will_lie(loaded: Loaded, files: Files) -> Path:
    """Where a fetch will put them; a branch's commit is not known before it is asked for."""
    if not is_remote(files):
        return checkpoint_at(source(loaded, files))
    cache = _cache(files)
    if cache is None:
        return Path("HF_HOME") / files.source.removeprefix("hf:")
    return cache.snapshot(_revision(files))


def _cache(files: Files) -> "HubCache | None":
    """None where huggingface_hub is not installed."""
    if find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import constants

    from stoker.up.hub_cache import HubCache
    from stoker.weights.hub import parse_repository

    return HubCache(Path(constants.HF_HUB_CACHE), parse_repository(files.source)[0])


def _revision(files: Files) -> str:
    from stoker.weights.hub import parse_repository

    named = parse_repository(files.source)[1]
    return named if files.revision == "main" else files.revision


def check(path: Path, engine: str) -> str:
    """What the checkpoint is. Raises NotUsable for what Stoker's engine could not load; vLLM reads more formats."""
    from stoker.checkpoint.inspect.report import inspect

    report = inspect(path)
    parts = ", ".join(f"{group.name} {group.format}" for group in report.groups[:3])
    said = f"{report.architecture}: {parts}" if parts else report.architecture
    if not report.errors:
        return said
    first = report.errors[0]
    if engine == "stoker":
        more = f" ({len(report.errors) - 1} more; stoker inspect lists them)" if len(report.errors) > 1 else ""
        raise NotUsable(f"{path} cannot be served: {first.message} {first.fix}{more}")
    return f"{said}; Stoker's own engine would not load it ({first.message})"
