"""Kernels are compiled by processes of their own while weights are read, so that recording finds them compiled.

This is the engine's side: it starts the processes, is told how far they are, and waits for them. Should they fail, the
engine compiles what it launches, one kernel after the other, as it would have without them.
"""

import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from stoker.backends.gpu import kernel_cache
from stoker.backends.gpu.kernels.launch import Card, card
from stoker.backends.reference import REFERENCES_ONLY
from stoker.engine.config import EngineConfig
from stoker.speculate.choice import DraftChoice

log = logging.getLogger("stoker.engine")
MOST_PROCESSES = 8
LOOK_S = 0.1


@dataclass(frozen=True)
class Task:
    """What the compiling process is told."""

    directory: Path
    sizes: EngineConfig
    draft: DraftChoice
    target: tuple[str, int | str, int]  # Triton's: backend, architecture, lanes of a warp
    card: Card
    processes: int


class Compilation:
    """Kernels that are being compiled for a start. As a context manager, ends with it."""

    def __init__(self, task: Task, folder: Path, key: str) -> None:
        self._folder, self._key = folder, key
        command = [sys.executable, "-m", "stoker.backends.gpu.compile_worker"]
        self._process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._done, self._found, self._listed = 0, 0, False
        self._reader = threading.Thread(target=self._read, name="stoker-kernels", daemon=True)
        self._reader.start()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died at once, which `wait` sees
            # it stays open: its end tells the process that nobody waits any more
            self._process.stdin.write(pickle.dumps(task))

    def wait(self, progress: Callable[[int, int], object]) -> None:
        while self._reader.is_alive():
            progress(self._done, self._found if self._listed else 0)
            self._reader.join(LOOK_S)
        progress(self._done, self._found)
        if code := self._process.wait():
            log.warning("the process that compiles kernels ended with exit code %d: they are compiled one by one", code)
        elif self._found:
            kernel_cache.mark_complete(self._folder, self._key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if kind is not None:
            self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._done, self._found, self._listed = json.loads(line)


class NothingToCompile:
    """A start like this one has compiled all its kernels before."""

    def wait(self, progress: Callable[[int, int], object]) -> None:
        """At once."""


@contextmanager
def compile_ahead(
    directory: Path, device: torch.device, sizes: EngineConfig, draft: DraftChoice
) -> Iterator[Compilation | NothingToCompile]:
    """Starts compiling the kernels of an engine on this checkpoint, unless that has been done before."""
    if REFERENCES_ONLY:
        yield NothingToCompile()
        return
    sizes = replace(sizes, assumed_tokens=None)  # which no kernel knows of
    folder = kernel_cache.kernel_folder()
    kernel_cache.hash_kernels()
    import triton
    from triton.runtime.driver import driver

    with torch.cuda.device(device):
        target = driver.active.get_current_target()
        task = Task(
            directory, sizes, draft, (target.backend, target.arch, target.warp_size), card(device), _processes()
        )
    key = kernel_cache.start_key(directory, sizes, draft, task.target, task.card, triton.__version__, torch.__version__)
    if kernel_cache.complete(folder, key):
        yield NothingToCompile()
        return
    with Compilation(task, folder, key) as compilation:
        yield compilation


def _processes() -> int:
    """Half of the processors, for the other half reads weights."""
    return max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0)) // 2))
