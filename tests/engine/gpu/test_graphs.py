"""What recording does, on a machine without a GPU: CUDA's part is played by nothing but the calls it must get."""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from stoker.engine.gpu.graphs import Recorder


class Work:
    """Something recorded, with memory of its own that nobody else keeps."""

    def __init__(self) -> None:
        self.memory = torch.zeros(4)
        self.runs = 0

    def run(self) -> None:
        self.runs += 1


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was replayed, by a stand-in that holds nothing, as a CUDA graph holds only addresses."""
    said: list[str] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    stand_ins = {
        "graph_pool_handle": lambda: (0, 0),
        "Stream": lambda device: stream,
        "current_stream": lambda device: stream,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: said.append("replayed")),
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
    assert replays == ["replayed"]
    del recorded
    gc.collect()
    assert memory() is None, "and no longer than the graph"
