"""How fast files are read past the page cache, as weights are when a model is loaded."""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker.up.probe_readings import Disk
from stoker.weights.direct import DirectFile, Pool, align_down

BLOCK = 8 << 20
THREADS = 4
SECONDS = 1.5
MOST = 4 << 30  # bytes read at most
WRITTEN = 256 << 20  # bytes of a temporary file
SPARE = 2 << 30  # bytes that stay free beside it


def read_speed(model: Path | None) -> Disk:
    """Of the largest file of a model, or of a temporary file on the disk of the user's caches. Raises OSError."""
    if model:
        file = model if model.is_file() else max(model.rglob("*.safetensors"), key=_size, default=None)
        if file is None or _size(file) < BLOCK:
            raise OSError(f"{_short(model)} holds no file of {BLOCK >> 20} MiB or more to read")
        return _measure(file.resolve(), _short(file))
    with _temporary() as (file, name):
        return _measure(file, name)


def _measure(path: Path, name: str) -> Disk:
    file, pool = DirectFile(path), Pool(THREADS * BLOCK)
    try:
        blocks = min(align_down(file.size), MOST) // BLOCK
        taken, read, lock = iter(range(blocks)), [0] * THREADS, threading.Lock()
        until = time.perf_counter() + SECONDS
        failed: list[OSError] = []

        def work(number: int) -> None:
            memory = pool.take(BLOCK)
            while not failed and time.perf_counter() < until:
                with lock:
                    block = next(taken, None)
                if block is None:
                    return
                try:
                    read[number] += file.read(memory.address, block * BLOCK, (block + 1) * BLOCK)
                except OSError as error:
                    failed.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - started
    finally:
        direct = file.direct
        file.close()
        pool.close()
    if failed:
        raise failed[0]
    return Disk(name, sum(read) / seconds / 1e9, sum(read), direct)


@contextmanager
def _temporary() -> Iterator[tuple[Path, str]]:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())
    free = shutil.disk_usage(folder).free
    if free < WRITTEN + SPARE:
        raise OSError(f"{_short(folder)} has {free / 1e9:.1f} GB free, too few for a temporary file; name a --model")
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        raise OSError("a temporary file needs Linux; name a --model")
    with tempfile.TemporaryFile(dir=folder) as file:  # without a name, so that not even a kill leaves it there
        block = os.urandom(1 << 20) * (BLOCK >> 20)
        for _ in range(WRITTEN // BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield descriptors / str(file.fileno()), f"a temporary file in {_short(folder)}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _short(path: Path) -> str:
    """Without the user's name."""
    home = str(Path.home())
    text = str(path.absolute())
    return f"~{text[len(home) :]}" if text.startswith(f"{home}/") else text
