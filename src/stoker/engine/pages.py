"""Who owns which KV page and which slot. Only numbers; the tensors are in `model/cache.py`."""

from collections import Counter
from collections.abc import Iterable


class Pool:
    """Numbers 0 .. size - 1, each free or held by one or several owners. The lowest free ones go out first, so runs
    are reproducible."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._owners = [0] * size

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int = 1) -> list[int]:
        if count > len(self._free):
            raise ValueError(f"{count} wanted, {len(self._free)} of {self.size} free")
        numbers = [self._free.pop() for _ in range(count)]
        for number in numbers:
            self._owners[number] = 1
        return numbers

    def share(self, numbers: Iterable[int]) -> None:
        """One owner more for numbers that are held already."""
        for number in numbers:
            if not self._owners[number]:
                raise ValueError(f"{number} is free and cannot be shared")
            self._owners[number] += 1

    def give_back(self, numbers: Iterable[int]) -> None:
        """One owner less; a number without owners is free."""
        for number in reversed(list(numbers)):
            if not self._owners[number]:
                raise ValueError(f"{number} is free already")
            self._owners[number] -= 1
            if not self._owners[number]:
                self._free.append(number)

    def check_integrity(self, held: Iterable[int]) -> None:
        """`held` lists every number once per owner: the books must agree."""
        owners = Counter(held)
        if self._owners != [owners[number] for number in range(self.size)]:
            raise AssertionError(f"owners on record {self._owners} differ from {dict(owners)}")
        if sorted(self._free) != [number for number in range(self.size) if not owners[number]]:
            raise AssertionError(f"free {sorted(self._free)} differ from what {dict(owners)} leaves of {self.size}")
