"""How much is tested: `make test` leaves out tests marked `long` and draws fewer cases; `make test-all` sets
STOKER_TESTS=all and runs everything
but what takes a real vLLM, which `make test-vllm` alone runs (STOKER_TESTS=vllm).
"""

import os

ALL = os.environ.get("STOKER_TESTS") == "all"
VLLM = os.environ.get("STOKER_TESTS") == "vllm"
