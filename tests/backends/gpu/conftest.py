from tests.backends.gpu.kernels.conftest import compiler, interpreter

__all__ = ["compiler", "interpreter"]
