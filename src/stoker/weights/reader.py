"""Reads tensors from safetensors files into memory at the speed of the disk.

Background threads read large aligned pieces in the order of the files, past the page cache. Where a tensor goes in a
model is decided elsewhere.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from ctypes import memmove
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from stoker.errors import CheckpointError
from stoker.weights.direct import ALIGN, Block, DirectFile, Pool, align_down, align_up
from stoker.weights.headers import TensorInfo

DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8,
}  # fmt: skip
# Measured on 2 cores and a virtio disk, 12.5 GB, GB/s. Plain direct reads: 2 readers of 2 MiB 6.7, 4 of 2 MiB 5.7, of
# 8 and 16 MiB less, since their buffers leave the processor's cache. This loader with 2, 3, 4 threads: 5.9, 6.3, 6.6 in
# requests of 2 MiB, 6.3, 6.1, 5.7 in 4 MiB. Four also suit drives that want a deeper queue.
REQUEST = 2 << 20  # bytes
THREADS = 4
WINDOW = 32 << 20  # bytes requested ahead: 6 ms of work, so that readers stay busy while the caller is descheduled
GAP = 64 << 10  # bytes between two tensors that are read over rather than skipped
SHARE = 4  # a temporary tensor smaller than a quarter of its block gets memory of its own

Into = Callable[[TensorInfo], Tensor | None]
Progress = Callable[[int, int], None]  # bytes read so far, bytes in all


def read_tensor(info: TensorInfo) -> Tensor:
    """One tensor on the CPU, in the dtype of the file."""
    tensor = torch.empty(info.shape, dtype=_dtype(info))
    for _ in read_tensors([info], into=lambda _: tensor, threads=1):
        pass
    return tensor


def read_tensors(
    infos: Sequence[TensorInfo], *, into: Into | None = None, threads: int = THREADS, progress: Progress | None = None
) -> Iterator[tuple[TensorInfo, Tensor]]:
    """Every tensor once, as soon as it is complete, on the CPU in the dtype of the file.

    `into` may return a contiguous CPU tensor of the same dtype and shape to be filled; it and `progress` run in the
    caller's thread. Tensors without one are temporary: aligned only to their elements, and while one is kept, up to
    SHARE times its size stays in memory. Extra memory is at most twice the largest tensor (one with the caller, one
    being read), and fixed: one WINDOW, and one REQUEST per thread. Readers wait for a slow caller. Closing the
    iterator stops them and frees everything.
    """
    for info in infos:
        _dtype(info)  # refuse an unreadable dtype before anything is read
    reader = _Reader(infos, into, threads)
    total = sum(info.nbytes for info in infos)
    try:
        for _ in range(reader.requests):
            reader.request_ahead()
            batch = reader.wait()
            if progress:
                progress(reader.done, total)
            if batch.missing:
                continue
            reader.request_ahead()  # so that reading continues while the caller is busy
            tensors, size = batch.finish(), batch.size
            del batch  # from here on the caller alone keeps the memory
            while tensors:
                yield tensors.pop()
            reader.handed_over(size)  # and the caller has released the batch before
    finally:
        reader.close()


@dataclass(slots=True)
class _Batch:
    """Adjacent tensors of a file that fit into one request, or one larger tensor."""

    infos: list[TensorInfo]
    cuts: list[tuple[int, int]]  # the aligned ranges of the file that its requests read
    missing: int  # requests
    done: int = 0  # bytes of its tensors
    given: list[Tensor] | None = None
    block: Block | None = None  # memory of temporary tensors
    file: DirectFile = field(init=False)

    @property
    def start(self) -> int:
        return self.cuts[0][0]

    @property
    def size(self) -> int:
        return self.cuts[-1][1] - self.start

    def straight(self, start: int, stop: int) -> int | None:
        """The address to which these bytes can be read directly: in the block, or in aligned memory of the caller."""
        if self.block:
            return self.block.address + start - self.start
        assert self.given
        address = self.given[0].data_ptr() + start - self.infos[0].offset
        return address if address % ALIGN == 0 and _overlap(self.infos[0], start, stop) == (start, stop) else None

    def copy_from(self, address: int, start: int, stop: int) -> None:
        """Copies bytes `start` to `stop` of the file from the buffer they were read into to their tensors."""
        for info, tensor in zip(self.infos, self.given or (), strict=True):
            begin, end = _overlap(info, start, stop)
            memmove(tensor.data_ptr() + begin - info.offset, address + begin - start, end - begin)

    def finish(self) -> list[tuple[TensorInfo, Tensor]]:
        """The tensors in reverse order, as views of the block where possible."""
        if self.given:
            return list(zip(self.infos, self.given, strict=True))[::-1]
        assert self.block
        memory, tensors = torch.frombuffer(self.block.buffer, dtype=torch.uint8), []
        for info in reversed(self.infos):
            begin = info.offset - self.start
            if info.nbytes * SHARE < memory.nbytes or info.offset % _dtype(info).itemsize:
                tensor = _empty(info)  # too small to keep the whole block alive, or misaligned in it
                memmove(tensor.data_ptr(), self.block.address + begin, info.nbytes)
            else:
                tensor = memory[begin : begin + info.nbytes].view(_dtype(info)).view(info.shape)
            tensors.append((info, tensor))
        return tensors


class _Reader:
    """Plans requests, hands them to threads and collects the results; only `_work` runs outside the caller's thread."""

    def __init__(self, infos: Sequence[TensorInfo], into: Into | None, threads: int) -> None:
        self.done = 0  # bytes
        self._batches = deque(_batches(infos))
        self.requests = sum(len(batch.cuts) for batch in self._batches)
        self._budget = 2 * max((info.nbytes for info in infos), default=0) + WINDOW  # bytes of memory
        self._taken = 0  # of these: in batches that are being read or that the caller has
        self._last = 0  # of these: in the batch that the caller releases when it takes the next one
        self._unread = 0  # bytes requested and not yet read
        self._into = into
        self._pool = Pool(self._budget)
        self._files: dict[Path, DirectFile] = {}
        self._queue: SimpleQueue[tuple[_Batch, int, int] | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[_Batch, int, int] | BaseException] = SimpleQueue()
        self._lock = threading.Lock()
        self._stopped = False
        # Daemons, so that an iterator that was not closed does not keep the interpreter from exiting.
        self._threads = [threading.Thread(target=self._work, name="stoker-read", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def request_ahead(self) -> None:
        """Request the next batches, as far ahead as the window and the memory budget allow."""
        while self._batches and self._unread < WINDOW and self._taken + self._batches[0].size <= self._budget:
            batch = self._batches.popleft()
            self._taken += batch.size
            self._unread += batch.size
            self._prepare(batch)
            for start, stop in batch.cuts:
                self._queue.put((batch, start, stop))

    def wait(self) -> _Batch:
        """Wait for the next request to complete; returns its batch."""
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        batch, start, stop = answer
        nbytes = sum(end - begin for begin, end in (_overlap(info, start, stop) for info in batch.infos))
        batch.missing -= 1
        batch.done += nbytes
        self._unread -= stop - start
        self.done += nbytes
        return batch

    def handed_over(self, size: int) -> None:
        self._taken -= self._last
        self._last = size

    def close(self) -> None:
        self._stopped = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        for file in self._files.values():
            file.close()
        self._pool.close()

    def _prepare(self, batch: _Batch) -> None:
        batch.file = self._open(batch.infos[0])
        if self._into:
            given = [_given(info, self._into) for info in batch.infos]
            if any(tensor is not None for tensor in given):
                pairs = zip(batch.infos, given, strict=True)
                batch.given = [_empty(info) if tensor is None else tensor for info, tensor in pairs]

    def _open(self, info: TensorInfo) -> DirectFile:
        if info.file not in self._files:
            try:
                self._files[info.file] = DirectFile(info.file)
            except OSError as error:
                raise CheckpointError(
                    f"{info.file} cannot be opened to read {info.name}: 0 of {info.nbytes:,} bytes, {error.strerror}."
                ) from error
        return self._files[info.file]

    def _work(self) -> None:
        pool = Pool(0)
        bounce = pool.take(REQUEST)
        while (request := self._queue.get()) is not None:
            if not self._stopped:
                try:
                    self._answers.put(self._perform(*request, bounce.address))
                except BaseException as error:
                    self._answers.put(error)
            del request  # or it would keep its tensors alive while this thread waits

    def _perform(self, batch: _Batch, start: int, stop: int, bounce: int) -> tuple[_Batch, int, int]:
        if batch.given is None:
            with self._lock:
                # Allocated as late as possible: the memory that was released last is still in the processor's cache.
                batch.block = batch.block or self._pool.take(batch.size)
        straight = batch.straight(start, stop)
        _read(batch, start, stop, straight or bounce)
        if straight is None:
            batch.copy_from(bounce, start, stop)
        return batch, start, stop


def _read(batch: _Batch, start: int, stop: int, address: int) -> None:
    try:
        reached = start + batch.file.read(address, start, stop)
    except OSError as error:
        info = batch.infos[0]
        raise CheckpointError(
            f"{info.file} failed while reading {info.name}: {batch.done:,} of {info.nbytes:,} bytes, then "
            f"{error.strerror}; check the disk, then fetch the file again."
        ) from error
    for info in batch.infos:
        if reached < _overlap(info, start, stop)[1]:
            got = max(min(reached, batch.file.size) - info.offset, 0)  # a later request starts beyond the end
            raise CheckpointError(
                f"{info.file} ended while reading {info.name}: {got:,} of {info.nbytes:,} bytes; fetch it again."
            )


def _given(info: TensorInfo, into: Into) -> Tensor | None:
    tensor = into(info)
    if tensor is not None and (
        tensor.dtype != _dtype(info) or tensor.shape != info.shape or not tensor.is_cpu or not tensor.is_contiguous()
    ):
        raise ValueError(
            f"{info.name} needs a contiguous {_dtype(info)} of shape {list(info.shape)} on the CPU to read into, "
            f"got {tensor.dtype} {list(tensor.shape)} of strides {tensor.stride()} on {tensor.device}"
        )
    return tensor


def _dtype(info: TensorInfo) -> torch.dtype:
    if info.dtype not in DTYPES:
        raise CheckpointError(
            f"{info.file}: {info.name} is stored in {info.dtype}; Stoker reads only {', '.join(DTYPES)} so far."
        )
    return DTYPES[info.dtype]


def _end(info: TensorInfo) -> int:
    return info.offset + info.nbytes


def _overlap(info: TensorInfo, start: int, stop: int) -> tuple[int, int]:
    return max(start, info.offset), min(stop, _end(info))


def _empty(info: TensorInfo) -> Tensor:
    return torch.empty(info.shape, dtype=_dtype(info))


def _batches(infos: Sequence[TensorInfo]) -> Iterator[_Batch]:
    group: list[TensorInfo] = []
    start = stop = 0
    for info in sorted(infos, key=lambda info: (str(info.file), info.offset)):
        end = align_up(max(stop, _end(info), info.offset + 1))  # a page even for an empty tensor
        if group and (info.file != group[0].file or info.offset - _end(group[-1]) > GAP or end - start > REQUEST):
            yield _batch(group, start, stop)
            group = []
        if not group:
            start, end = align_down(info.offset), align_up(max(_end(info), info.offset + 1))
        group.append(info)
        stop = end
    if group:
        yield _batch(group, start, stop)


def _batch(infos: list[TensorInfo], start: int, stop: int) -> _Batch:
    cuts = [(at, min(at + REQUEST, stop)) for at in range(start, stop, REQUEST)]
    return _Batch(infos, cuts, len(cuts))
