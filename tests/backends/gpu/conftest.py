from tests.backends.gpu.kernels.conftest import interpreter

__all__ = ["interpreter"]
