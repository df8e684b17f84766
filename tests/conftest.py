"""Small random checkpoints shared by the tests, made once per run.

Tests and the processes they start use one thread: their matrices are small, and other tests run beside them.
"""

import os
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ["XDG_DATA_HOME"] = "/nonexistent"  # measurements of whoever runs the tests are none of theirs

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # run in the background, where what tests interrupt inherits it
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch

from tests.support.extent import ALL, VLLM
from tests.support.random_checkpoint import small_config, write_random_checkpoint
from tests.support.tokenizer import write_byte_tokenizer
from tests.support.triton_processes import compiler, interpreter

__all__ = ["checkpoints", "compiler", "interpreter"]

LEFT_OUT = "tests marked long are left out and fewer cases drawn; STOKER_TESTS=all, or make test-all, runs everything"
FAMILIES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe")


def pytest_report_header() -> str | None:
    return None if ALL else LEFT_OUT


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if bool(item.get_closest_marker("vllm")) != VLLM]
    left_out += [] if ALL or VLLM else [item for item in items if item.get_closest_marker("long")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A bf16 checkpoint with a byte tokenizer per family."""
    root = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        write_random_checkpoint(root / family, small_config(family))
        write_byte_tokenizer(root / family)
    return {family: root / family for family in FAMILIES}
