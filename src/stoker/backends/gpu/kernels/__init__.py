"""Triton kernels, one file per operation."""
