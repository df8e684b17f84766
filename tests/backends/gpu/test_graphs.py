"""What recording does, on a machine without a GPU: CUDA's part is played by nothing but the calls it must get."""

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from stoker.backends.gpu.graphs import Recorder


class Work:
    """Something recorded, with memory of its own that nobody else keeps."""

    def __init__(self) -> None:
        self.memory = torch.zeros(4)
        self.runs = 0

    def run(self) -> None:
        self.runs += 1


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which graphs were replayed, by stand-ins that hold nothing, as a CUDA graph holds only addresses."""
    said: list[str] = []
    numbers = count(1)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    stand_ins = {
        "graph_pool_handle": lambda: (0, 0),
        "Stream": lambda device: stream,
        "current_stream": lambda device: stream,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=partial(said.append, f"graph {next(numbers)}")),
        "graph": lambda graph, pool: nullcontext(),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return said


def test_a_graph_keeps_the_memory_it_works_on(replays: list[str]) -> None:
    """Freed memory would be handed to the next who asks, and both would write to it."""
    work = Work()
    memory = weakref.ref(work.memory)
    recorded = Recorder(torch.device("cuda")).record(work.run)
    assert work.runs == 2, "once to compile, once to record"
    del work
    gc.collect()
    assert memory() is not None
    recorded()
    assert replays == ["graph 1"]
    del recorded
    gc.collect()
    assert memory() is None, "and no longer than the graph"


def test_bodies_are_a_graph_each_and_replayed_in_order(replays: list[str]) -> None:
    ran: list[str] = []
    recorder = Recorder(torch.device("cuda"))
    both = recorder.record(lambda: ran.append("first"), lambda: ran.append("rest"))
    assert ran == ["first", "rest"] * 2, "once to compile, once to record"
    both()
    both()
    assert replays == ["graph 1", "graph 2"] * 2
    assert len(ran) == 4
    assert recorder.count == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_recording(replays: list[str], enabled: bool) -> None:
    """The collector may find graphs of an engine that is no more; freeing them then spoils the recording."""
    collecting: list[bool] = []

    def broken() -> None:
        collecting.append(gc.isenabled())
        if len(collecting) == 4:
            raise RuntimeError("no such kernel")

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        recorder = Recorder(torch.device("cuda"))
        recorder.record(lambda: collecting.append(gc.isenabled()))
        assert gc.isenabled() == enabled, "as it was"
        with pytest.raises(RuntimeError, match="no such kernel"):
            recorder.record(broken)
        assert gc.isenabled() == enabled, "whatever happens"
    finally:
        (gc.enable if before else gc.disable)()
    assert collecting == [enabled, False, enabled, False]


def test_without_a_gpu_bodies_run_as_they_are() -> None:
    ran: list[str] = []
    both = Recorder(torch.device("cpu")).record(lambda: ran.append("first"), lambda: ran.append("rest"))
    assert ran == []
    both()
    assert ran == ["first", "rest"]
