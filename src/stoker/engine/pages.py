"""Who owns which KV page and which slot. Only numbers; the tensors are the backend's."""

from collections import Counter
from collections.abc import Iterable


class Pool:
    """Numbers 0 .. size - 1, each free or held by one or several owners. The last ones given back go out first, from 0
    on in the beginning, so runs are reproducible.

    Some owners only pin a number until somebody needs it more (snapshots do); what they alone hold is `reclaimable`.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.reclaimable = 0
        self._free = list(range(size - 1, -1, -1))
        self._owners = [0] * size  # pins included
        self._pins = [0] * size

    @property
    def free(self) -> int:
        return len(self._free)

    def unheld(self) -> list[int]:
        """The free ones, in order."""
        return sorted(self._free)

    def pinned_alone(self, number: int) -> bool:
        """One pin is all that holds it."""
        return self._owners[number] == self._pins[number] == 1

    def take(self, count: int = 1) -> list[int]:
        if count > len(self._free):
            raise ValueError(f"{count} wanted, {len(self._free)} of {self.size} free")
        numbers = [self._free.pop() for _ in range(count)]
        for number in numbers:
            self._owners[number] = 1
        return numbers

    def share(self, numbers: Iterable[int], pin: bool = False) -> None:
        """One owner more for numbers that are held already."""
        for number in numbers:
            if not self._owners[number]:
                raise ValueError(f"{number} is free and cannot be shared")
            self._change(number, 1, pin)

    def give_back(self, numbers: Iterable[int], pin: bool = False) -> None:
        """One owner less; a number without owners is free."""
        for number in reversed(list(numbers)):
            if not self._owners[number]:
                raise ValueError(f"{number} is free already")
            self._change(number, -1, pin)
            if not self._owners[number]:
                self._free.append(number)

    def check_integrity(self, held: Iterable[int], pinned: Iterable[int] = ()) -> None:
        """`held` lists every number once per owner, `pinned` once per pin: the books must agree."""
        pins = Counter(pinned)
        owners = Counter(held) + pins
        for name, found, expected in (("owners", self._owners, owners), ("pins", self._pins, pins)):
            if found != [expected[number] for number in range(self.size)]:
                raise AssertionError(f"{name} on record {found} differ from {dict(expected)}")
        if sorted(self._free) != [number for number in range(self.size) if not owners[number]]:
            raise AssertionError(f"free {sorted(self._free)} differ from what {dict(owners)} leaves of {self.size}")
        if self.reclaimable != sum(count == pins[number] for number, count in owners.items()):
            raise AssertionError(f"{self.reclaimable} reclaimable on record, owners {dict(owners)}, pins {dict(pins)}")

    def _change(self, number: int, by: int, pin: bool) -> None:
        self.reclaimable -= 0 < self._pins[number] == self._owners[number]
        self._owners[number] += by
        if pin:
            self._pins[number] += by
        self.reclaimable += 0 < self._pins[number] == self._owners[number]
