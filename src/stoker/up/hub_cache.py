"""A repository in the hub's cache, in the layout that all tools of the hub share: blobs, snapshots of links, refs."""

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from huggingface_hub.file_download import repo_folder_name

from stoker.errors import StokerError
from stoker.weights.checkpoint import INDEX
from stoker.weights.json_file import read_json

COMMIT = re.compile(r"[0-9a-f]{40}")
WAIT_S = 0.2


class HubCache:
    def __init__(self, root: Path, repository: str) -> None:
        self.root = root.expanduser().absolute()
        self._folder = repo_folder_name(repo_id=repository, repo_type="model")
        self.storage = self.root / self._folder

    def blob(self, sha256: str) -> Path:
        return self.storage / "blobs" / sha256

    def unfinished(self, sha256: str) -> Path:
        """The beginning of a blob, of a name that no other tool writes to."""
        return self.storage / "blobs" / f"{sha256}.stoker.incomplete"

    def snapshot(self, commit: str) -> Path:
        return self.storage / "snapshots" / commit

    def find(self, revision: str) -> tuple[str, Path] | None:
        """The commit of a branch, tag or commit and its snapshot, if the weights in it are complete."""
        commit = revision
        if not COMMIT.fullmatch(revision):
            with contextlib.suppress(OSError):
                commit = (self.storage / "refs" / revision).read_text(encoding="utf-8").strip()
        if not COMMIT.fullmatch(commit) or not _complete(self.snapshot(commit)):
            return None
        return commit, self.snapshot(commit)

    def point(self, revision: str, commit: str) -> None:
        """Notes the commit that a branch or tag stands at, for use without the network. Call it once all is there."""
        if COMMIT.fullmatch(revision):
            return
        ref = self.storage / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        new = ref.with_name(f"{ref.name}.{os.getpid()}.new")
        new.write_text(commit, encoding="utf-8")
        new.replace(ref)

    def drop(self, file: Path) -> None:
        """Removes a damaged file of a snapshot, and the blob that it leads to."""
        blob = file.resolve()
        file.unlink(missing_ok=True)
        if self.root in blob.parents:
            blob.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self, waiting: Callable[[], None]) -> Iterator[None]:
        """One fetch of a repository at a time; `waiting` is called while another one runs. The kernel releases the lock
        when a process ends, however it ends."""
        folder = self.root / ".locks" / self._folder
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "stoker-fetch.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    waiting()
                    time.sleep(WAIT_S)
            yield
        finally:
            os.close(descriptor)


def _complete(folder: Path) -> bool:
    if not (folder / "config.json").exists():
        return False
    if not (folder / INDEX).exists():
        return any(folder.glob("*.safetensors"))
    try:
        listed = read_json(folder / INDEX).get("weight_map")
    except StokerError:
        return False
    return isinstance(listed, dict) and all((folder / str(name)).exists() for name in set(listed.values()))
