"""Triton kernels, one file per operation; importing a file registers its kernel with the dispatch."""
