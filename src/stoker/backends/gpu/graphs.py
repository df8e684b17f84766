"""Launches recorded once and replayed, and numbers on their way between host and device: nothing here allocates in a
step. Without a GPU the launches are made anew each time."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.backends.gpu.kernels import launch
from stoker.backends.reference import REFERENCES_ONLY


class Recorded:
    """Bodies that run one after the other, each as a graph if there are graphs of them. A graph has only the addresses
    of what its body works on: without the body that memory might be anyone's."""

    def __init__(self, bodies: Sequence[Callable[[], None]]) -> None:
        self.bodies = bodies
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def __call__(self) -> None:
        for graph in self.graphs:
            graph.replay()
        if not self.graphs:
            for body in self.bodies:
                body()


@contextmanager
def _no_collection() -> Iterator[None]:
    """A graph that the garbage collector finds and frees while another is recorded spoils the recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Recorder:
    def __init__(self, device: torch.device, later: bool = False) -> None:
        """`later`: nothing is recorded before `finish`, which can then say how much there is of it."""
        gc.collect()  # graphs of an engine that is no more, and their memory
        self._later = later
        self._waiting: list[Recorded] = []
        self._device = device
        self._graphs = device.type == "cuda" and not REFERENCES_ONLY  # which look at numbers on the host
        self._pool = torch.cuda.graph_pool_handle() if self._graphs else None
        self.count = 0  # of what was recorded

    def record(self, *bodies: Callable[[], None]) -> Recorded:
        """`bodies`, one after the other, as a CUDA graph each. They run once as they are, which compiles their kernels:
        on an empty batch, please. Launching takes the host longer the more kernels a graph has, and the GPU waits for
        it: a short first body is computed while the second is launched."""
        self.count += 1
        recorded = Recorded(bodies)
        self._waiting.append(recorded)
        if not self._later:
            self.finish()
        return recorded

    def finish(self, progress: Callable[[int, int], object] = lambda done, total: None) -> None:
        """Records what waits for it; `progress` is told how many of them are done, and how many there are."""
        waiting, self._waiting = self._waiting, []
        for done, recorded in enumerate(waiting):
            progress(done, len(waiting))
            if self._graphs:
                self._capture(recorded)
            elif launch.is_assumed():
                recorded()
        progress(len(waiting), len(waiting))

    def _capture(self, recorded: Recorded) -> None:
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            recorded()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graphs = [torch.cuda.CUDAGraph() for _ in recorded.bodies]
        for graph, body in zip(graphs, recorded.bodies, strict=True):
            with _no_collection(), torch.cuda.graph(graph, pool=self._pool):
                body()
        recorded.graphs = graphs


class Upload:
    """Numbers for a tensor on the device, written on the host and sent by one copy: at once by `send`, or by a
    recording that `launch` is a part of, after whose replay `mark` is called."""

    def __init__(self, target: Tensor) -> None:
        self.target = target
        self._host = torch.zeros(target.shape, dtype=target.dtype, pin_memory=target.is_cuda)
        self._numbers: np.ndarray[Any, np.dtype[np.int32]] = self._host.numpy()
        self._sent = torch.cuda.Event() if target.is_cuda else None

    def open(self) -> "np.ndarray[Any, np.dtype[np.int32]]":
        """All zeros, to be written; waits until the last ones are on their way."""
        if self._sent is not None:
            self._sent.synchronize()
        self._numbers.fill(0)
        return self._numbers

    def launch(self) -> None:
        self.target.copy_(self._host, non_blocking=True)

    def mark(self) -> None:
        """What was launched until now reads the numbers."""
        if self._sent is not None:
            self._sent.record()

    def send(self) -> None:
        self.launch()
        self.mark()


class Download:
    """A tensor of the device, read by the host as it is after all that was launched before: by `read`, or as `Upload`
    by a recording that `launch` is a part of, then `mark` and `finish`."""

    def __init__(self, source: Tensor) -> None:
        self.source = source
        self._host = torch.zeros(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        self._there = torch.cuda.Event() if source.is_cuda else None

    def launch(self) -> None:
        if not self.source.is_meta:
            self._host.copy_(self.source, non_blocking=True)

    def mark(self) -> None:
        if self._there is not None:
            self._there.record()

    def finish(self) -> Tensor:
        """Waits until it is there. The next one overwrites it."""
        if self._there is not None:
            self._there.synchronize()
        return self._host

    def read(self) -> Tensor:
        self.launch()
        self.mark()
        return self.finish()
