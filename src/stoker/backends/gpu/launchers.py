"""The C code by which Triton before 3.7 launches kernels on NVIDIA: built for each signature, with a C compiler."""

from typing import Any

from triton.backends.nvidia import driver


def build_launcher(compiled: Any) -> None:
    """Into Triton's cache, which a launch looks into first. Nothing where one launcher serves all kernels."""
    if hasattr(driver, "make_launcher") and compiled.metadata.target.backend == "cuda":
        driver.CudaLauncher(compiled.src, compiled.metadata)
