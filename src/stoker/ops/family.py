"""The two numeric families. A token belongs to one of them for good, whatever the load.

PREFILL computes prompt tokens in 64-token chunks anchored at absolute multiples of 64; STEP computes decoded,
verified and replayed tokens one after another. Library GEMMs give a row other bits for other row counts, so both
multiply in tiles of a fixed number of rows.
"""

from enum import Enum

CHUNK = 64  # DeltaNet chunk and prefill attention tile, anchored at absolute multiples


class Family(Enum):
    STEP = "step"
    PREFILL = "prefill"

    @property
    def tile(self) -> int:
        """Rows of one matmul."""
        return 16 if self is Family.STEP else CHUNK
