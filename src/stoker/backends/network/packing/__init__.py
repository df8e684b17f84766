"""Weights laid out once, after loading, for torch's packed CPU kernels, and the products with them.

Activations are bf16 between operations and fp32 inside them, weights keep the checkpoint's exact values, and every
product is one whose rows were checked not to influence each other's bits (`trial.py`).
"""
