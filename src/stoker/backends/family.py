"""The two numeric families. A token belongs to one of them for good, whatever the load.

PREFILL computes prompt tokens in chunks anchored at absolute multiples of 64; STEP computes decoded, verified and
replayed tokens in chunks anchored at absolute multiples of 16. Library GEMMs give a row other bits for other row
counts, so both multiply in tiles of a fixed number of rows, or by a product that was found not to depend on it.
"""

from enum import Enum

PAGE_SIZE = 64  # tokens per KV page; equal to CHUNK, so snapshots of recurrent states end on page borders
CHUNK = 64  # DeltaNet chunk and prefill attention tile, anchored at absolute multiples
STEP_CHUNK = 16  # DeltaNet chunk of steps, likewise
STEP_TILE = 8  # attention tile of steps, likewise
SPLIT = 256  # keys per partial softmax of attention, from position 0 on; a multiple of every page size


class Family(Enum):
    STEP = "step"
    PREFILL = "prefill"

    @property
    def tile(self) -> int:
        """Rows of one matmul."""
        return 16 if self is Family.STEP else CHUNK
