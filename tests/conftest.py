"""Small random checkpoints shared by the tests, made once per run.

Tests and the processes they start use one thread: their matrices are small, and other tests run beside them.
"""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import pytest
import torch

from stoker.demo.tokenizer import write_byte_tokenizer
from tests.support.random_checkpoint import small_config, write_random_checkpoint

FAMILIES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe")


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
