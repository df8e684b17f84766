"""The numeric operations the model calls: a torch reference each, and one dispatch rule for kernels.

References are exact in the sense of the two numeric families (see `family.py`): a row's bits do not depend on
how many rows ride along, on its neighbours, or on how much is cached.
"""
