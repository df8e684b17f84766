"""The process that lists the kernels of a start and has them compiled: `python -m stoker.backends.gpu.compile_worker`.

It reads a pickled `Task` from its input and writes a line whenever it knows more: kernels done, kernels found, and
whether those are all. It never touches a GPU. When its input ends, nobody waits any more, and it ends with its
children.
"""

import json
import os
import pickle
import sys
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import TextIO

from triton.backends.compiler import GPUTarget
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver

from stoker.backends.gpu.compile_ahead import Task
from stoker.backends.gpu.kernel_cache import hash_kernels
from stoker.backends.gpu.kernel_list import Needed, NoDriver, compile_kernel, list_kernels
from stoker.backends.gpu.launchers import build_launcher
from stoker.engine.worker.heap import collection_paused

PARENT_CHECK_S = 1.0
NICE = 5  # reading weights comes first


class Progress:
    """What the engine is told. Called from the thread that lists and from the one that hears of compiled kernels."""

    def __init__(self, output: TextIO) -> None:
        self._output, self._lock = output, threading.Lock()
        self._done = self._found = 0

    def add(self, done: int = 0, found: int = 0, complete: bool = False) -> None:
        with self._lock:
            self._done, self._found = self._done + done, self._found + found
            self._output.write(json.dumps([self._done, self._found, complete]) + "\n")
            self._output.flush()


def main() -> None:
    task: Task = pickle.load(sys.stdin.buffer)
    progress = Progress(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)  # what compilers print is no progress
    os.nice(NICE)
    triton_key()  # a hash of the whole compiler: once, for all children
    hash_kernels()
    compile_all(task, progress)


def compile_all(task: Task, progress: Progress) -> None:
    target = GPUTarget(*task.target)
    compiled: list[Future[None]] = []
    # Forked while nothing but imports has run, so that there are no threads of torch's yet.
    with ProcessPoolExecutor(task.processes, get_context("fork"), _begin, (target, os.getpid())) as pool:
        pool.submit(os.getpid).result()
        threading.Thread(target=_end_with_input, daemon=True).start()

        def found(needed: Needed) -> None:
            progress.add(found=1)
            compiled.append(pool.submit(_compile, needed))
            compiled[-1].add_done_callback(lambda future: progress.add(done=1, complete=listed))

        listed = False
        with collection_paused():
            list_kernels(task.directory, task.sizes, task.draft, target, task.card, found)
        listed = True
        progress.add(complete=True)
    failures = [error for future in compiled if (error := future.exception())]
    if failures:
        sys.exit(f"{len(failures)} of {len(compiled)} kernels could not be compiled, the first: {failures[0]!r}")


def _begin(target: GPUTarget, parent: int) -> None:
    driver.set_active(NoDriver(target))
    threading.Thread(target=_end_if_left, args=(parent,), daemon=True).start()


def _compile(needed: Needed) -> None:
    build_launcher(compile_kernel(needed))


def _end_if_left(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
