"""The CPU backend: weights packed once for torch's own CPU kernels, the operations on them, and compiled kernels for
what lies between the products.

Activations are bf16 between operations and fp32 inside them, weights keep the checkpoint's exact values (a DFlash
drafter's may be rounded to bf16), and every product and kernel is one whose rows were checked not to influence each
other's bits (`check.py`, `enable.py`).
"""
