"""A real vLLM, which `make test-vllm` installs in build/vllm; the model is the embedded one's BF16 export."""

import subprocess
import sys
from pathlib import Path

import pytest

from stoker.demo import EMBEDDED

ROOT = Path(__file__).parents[2]
PATIENCE_S = 1500.0  # for a start; half a minute where nothing else runs


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `stoker build --base demo --to bf16` makes it: with heads of 128 it suits vLLM as it is."""
    folder = tmp_path_factory.mktemp("model") / "demo-bf16"
    command = [sys.executable, "-m", "stoker", "build", "--base", str(EMBEDDED), "--to", "bf16", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE_S)
    return folder
