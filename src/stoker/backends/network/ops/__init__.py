"""The numeric operations of the network in plain torch: pure functions, the reference for every kernel.

References are exact in the sense of the two numeric families (see `family.py`): a row's bits do not depend on
how many rows ride along, on its neighbours, or on how much is cached.
"""
