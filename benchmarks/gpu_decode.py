"""The command of the contract (`python benchmarks/gpu_decode.py`); what it does is in benchmarks/gpu/decode.py."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.gpu.decode import main

    main()
