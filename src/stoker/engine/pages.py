"""Who owns which KV page and which recurrent slot. Only numbers; the tensors are in `model/cache.py`."""

from stoker.errors import StokerError


class OutOfPages(StokerError):
    """More pages were asked for than are free."""


class Pool:
    """Numbers 0 .. size - 1, each free or taken. The lowest free ones go out first, so runs are reproducible."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int = 1) -> list[int]:
        if count > len(self._free):
            raise OutOfPages(f"{count} wanted, {len(self._free)} of {self.size} free.")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, numbers: list[int]) -> None:
        self._free.extend(reversed(numbers))

    def check_integrity(self, taken: list[int]) -> None:
        """Every number is free or in `taken`, and in one place only."""
        everything = sorted([*self._free, *taken])
        if everything != list(range(self.size)):
            raise AssertionError(f"free {sorted(self._free)} and taken {sorted(taken)} do not make 0..{self.size - 1}")
