"""Bytes, counted once, from a config and formats: weights, what a step reads, caches, and where the memory goes.

Plain arithmetic without torch. What backends really allocate is compared with it in tests/sizes.
"""
