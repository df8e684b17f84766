"""Stands in for vLLM in tests."""

import os

__version__ = os.environ.get("FAKE_VLLM_VERSION", "0.32.0")
