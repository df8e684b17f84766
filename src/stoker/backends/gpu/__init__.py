"""The step on a GPU: weights in operand order, state, and a forward of few launches that a CUDA graph can capture."""
