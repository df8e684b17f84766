"""The CPU backend: weights packed once for torch's own CPU kernels, and the operations on them.

Activations are bf16 between operations and fp32 inside them, weights keep the checkpoint's exact values, and every
product is one whose rows were checked not to influence each other's bits (`check.py`).
"""
