"""How much is tested: `make test` leaves out tests marked `long` and draws fewer cases; `make test-all` sets
STOKER_TESTS=all and runs everything.
"""

import os

ALL = os.environ.get("STOKER_TESTS") == "all"
