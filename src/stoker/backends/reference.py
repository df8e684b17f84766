"""Started with `STOKER_OPS=reference` in the environment, the references compute everything, for debugging a kernel
against them."""

import os

REFERENCES_ONLY = os.environ.get("STOKER_OPS") == "reference"
