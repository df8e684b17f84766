from tests.ops.triton.conftest import interpreter

__all__ = ["interpreter"]
