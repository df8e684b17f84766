"""A recipe's model brought to disk, verified: from a hub, resumable and with the free disk checked first, or a folder.

Only the files that an engine reads are fetched. They go into the cache that all tools of the hub share.
huggingface_hub, which the base install lacks, is imported when a hub is asked.
"""

import errno
import fnmatch
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from msgspec import Struct

from stoker.checkpoint.inspect.checksums import Checksum, find_checksums
from stoker.demo import checkpoint_at
from stoker.errors import DependencyError, StokerError
from stoker.up.hashes import Hashes
from stoker.weights.checkpoint import INDEX

HF = "hf:"
# What engines read: weights, configs, tokenizers and templates. Weights of other frameworks are left out.
READ = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt")
FOLDERS = ("drafter", "additional_chat_templates")  # others hold the same weights again, in other forms
REVISION = re.compile(r"[\w][\w.+-]*(/[\w.+-]+)*")
REPORT_S = 0.2  # between two calls of a user's `progress`
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FetchProgress(Struct, frozen=True):
    """Where a fetch stands."""

    step: Literal["listing", "waiting", "checking", "fetching"]
    done: int = 0  # bytes, those included that were there before
    total: int = 0
    note: str = ""  # why it does not go on, or what it found out


class Fetched(Struct, frozen=True):
    path: Path
    revision: str  # the commit; empty for a folder
    bytes: int  # of all its files
    note: str = ""  # what a user should know


class FetchError(StokerError):
    """Files that cannot be had, do not fit on the disk, or are not the ones that were asked for."""


Report = Callable[[FetchProgress], None]


def fetch(
    source: str,
    revision: str | None,
    sha256: Mapping[str, str],
    into: Path | None,
    progress: Report,
    also: Sequence[str] = (),
) -> Fetched:
    """The files of hf:OWNER/NAME[@REVISION], of a folder or of `demo`. What was fetched before is not sent again.

    `sha256` holds hashes that files must have, by name. `into` is a cache in the hub's layout, in place of the user's
    (HF_HOME). `also` are patterns of further files to fetch. `progress` is called in this thread, a few times a second.
    """
    if source.startswith(HF):
        return _from_hub(source, revision, sha256, into, progress, also)
    return _from_folder(source, sha256, progress)


def select(names: Iterable[str], also: Sequence[str] = ()) -> list[str]:
    """The files to fetch out of those of a repository."""
    found = list(names)
    sharded = any(name in (INDEX, "model.safetensors") for name in found)

    def wanted(name: str) -> bool:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in also):
            return True
        folder, _, file = name.rpartition("/")
        twice = sharded and file.startswith("consolidated")  # all weights again, as some publishers train them
        return folder in ("", *FOLDERS) and not twice and any(fnmatch.fnmatchcase(file, pattern) for pattern in READ)

    return [name for name in found if wanted(name)]


def _from_folder(source: str, sha256: Mapping[str, str], progress: Report) -> Fetched:
    path = checkpoint_at(source)
    if not path.is_dir():
        hint = f" For a repository of a hub write {HF}{source}." if re.fullmatch(r"[\w.-]+/[\w.-]+", source) else ""
        raise FetchError(f"there is no directory {path}.{hint}")
    if not (path / "config.json").exists():
        raise FetchError(f"{path} has no config.json, so it is no checkpoint.")
    stated = {name: Checksum("sha256", digest, "the recipe") for name, digest in sha256.items()}
    try:
        return Fetched(path, "", _check(path, stated, progress))
    except OSError as error:
        raise FetchError(f"{error.filename or path} cannot be read: {error.strerror}.") from error


def _from_hub(
    source: str,
    revision: str | None,
    sha256: Mapping[str, str],
    into: Path | None,
    progress: Report,
    also: Sequence[str],
) -> Fetched:
    if find_spec("huggingface_hub") is None:
        raise DependencyError(
            f"fetching {source} needs huggingface_hub, which the base install leaves out; install Stoker's engine "
            "(pip install -e '.[engine]' in its clone), or name a directory that holds the files."
        )
    from huggingface_hub import constants, is_offline_mode

    from stoker.up.download import Download
    from stoker.up.hub_cache import HubCache
    from stoker.weights.hub import Hub, HubUnavailable, parse_repository

    repository, named = parse_repository(source)
    if named != "main" and revision not in (None, "main", named):
        raise FetchError(f"{source} names one revision and the recipe another, {revision}; leave one of them out.")
    revision = named if revision in (None, "main") else revision
    if not REVISION.fullmatch(revision) or ".." in revision:
        raise FetchError(f"{revision!r} cannot name a commit, tag or branch.")
    cache = HubCache(into or Path(constants.HF_HUB_CACHE), repository)
    cached = cache.find(revision)
    if is_offline_mode():
        if cached is None:
            raise FetchError(
                f"HF_HUB_OFFLINE is set, and {cache.storage} does not hold {repository} at {revision} with all its "
                "weights; unset it, or name a directory that holds the files."
            )
        return _from_cache(*cached, sha256, progress, "")
    hub = Hub(repository, revision)
    download = Download(hub, cache, sha256, progress)
    patience = hub.attempts
    try:
        hub.attempts = 2 if cached else patience  # there is another way
        listed = download.listing()
        hub.attempts = patience
    except HubUnavailable as error:
        if cached is None:
            raise
        return _from_cache(
            *cached, sha256, progress, f"{str(error).partition(';')[0]}; the files of the cache are used"
        )
    if missing := set(sha256) - set(listed):
        raise FetchError(f"{source} has no {min(missing)}, of which the recipe states a hash.")
    names = {*select(listed, also), *sha256}
    if not any(name.endswith(".safetensors") for name in names):
        raise FetchError(f"{source} has no safetensors files, and Stoker reads no others.")
    files = [listed[name] for name in sorted(names)]
    try:
        with cache.locked(lambda: progress(FetchProgress("waiting", note=f"another process fetches {repository}"))):
            path = download.run(files)
            cache.point(revision, hub.revision)
    except OSError as error:
        raise _disk_error(error, cache.storage) from error
    return Fetched(path, hub.revision, sum(file.size for file in files), download.found_out)


def _from_cache(commit: str, path: Path, sha256: Mapping[str, str], progress: Report, note: str) -> Fetched:
    """A snapshot that was fetched before, by Stoker or another tool, compared with the hashes that the cache knows."""
    stated = {name: Checksum("sha256", digest, "the recipe") for name, digest in sha256.items()}
    size = _check(path, {**find_checksums(path), **stated}, progress)
    return Fetched(path, commit, size, note)


def _check(path: Path, wanted: Mapping[str, Checksum], progress: Report) -> int:
    """Bytes of all files of a folder; raises where one does not have its checksum."""
    sizes = {file: file.stat().st_size for file in sorted(path.rglob("*")) if file.is_file()}
    hashes, done, total = Hashes(), 0, sum(sizes.get(path / name, 0) for name in wanted)
    told = time.monotonic()

    def seen(count: int) -> None:
        nonlocal done, told
        done += count
        if done == total or time.monotonic() - told > REPORT_S:
            told = time.monotonic()
            progress(FetchProgress("checking", done, total))

    for name, checksum in wanted.items():
        if path / name not in sizes:
            raise FetchError(f"{path} has no {name}, of which {checksum.source} states a hash.")
        if not hashes.match(path / name, checksum, seen):
            raise FetchError(
                f"{path / name} does not have the {checksum.kind} hash that {checksum.source} states "
                f"({checksum.digest}): it is damaged, or another file. Remove it and fetch it again."
            )
    return sum(sizes.values())


def _disk_error(error: OSError, where: Path) -> StokerError:
    from stoker.up.download import free_bytes, gigabytes

    if error.errno in FULL:
        return FetchError(
            f"the disk is full, or a limit of it reached: {gigabytes(free_bytes(where))} are free in {where}. What has "
            "arrived is kept; make room and run the same command again."
        )
    return FetchError(f"{where} cannot be written to: {error.strerror or str(error).splitlines()[0]}.")
