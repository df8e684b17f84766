"""Torch's packed CPU kernels: weights laid out once for them, and the operations on those.

Activations are bf16 between operations and fp32 inside them, weights keep the checkpoint's exact values (a DFlash
drafter's may be rounded to bf16), and every product is one whose rows were checked not to influence each other's bits
(`check.py`).
"""
