"""The transfers of a program so far, and which of them touch an area."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from overlap_torch._plan import Memory, Region, Transfer
from overlap_torch.plan._areas import covers, overlap


class Transfers:
    """Transfers in the order in which they are written; a transfer's number is its place."""

    def __init__(self) -> None:
        self.all: list[Transfer] = []
        self._written: dict[tuple[int, Memory], list[int]] = {}
        self._read: dict[tuple[int, Memory], list[int]] = {}

    def add(self, made: Sequence[Transfer]) -> range:
        """Adds transfers; returns their numbers."""
        first = len(self.all)
        for number, one in enumerate(made, first):
            self.all.append(one)
            for of, region in ((self._read, one.source), (self._written, one.destination)):
                of.setdefault((region.rank, region.memory), []).append(number)
        return range(first, len(self.all))

    def writing(self, region: Region, before: int) -> Iterator[int]:
        """The transfers before number ``before`` that write into the region, the last one first."""
        return self._touching(self._written, region, before)

    def reading(self, region: Region, before: int) -> Iterator[int]:
        """The transfers that read in the region; otherwise as :meth:`writing`."""
        return self._touching(self._read, region, before)

    def data_needs(self, read: Region, written: Region) -> list[int]:
        """The transfers that write the data read here, and those that read or write the data written here."""
        before = len(self.all)
        found = {*self._last_writers(read), *self._last_writers(written)}
        return sorted(found | {*self.reading(written, before)})

    def _last_writers(self, region: Region) -> Iterator[int]:
        for number in self.writing(region, len(self.all)):
            yield number
            if covers(self.all[number].destination.area, region.area):
                return  # the ones before it came before it

    def _touching(
        self, of: dict[tuple[int, Memory], list[int]], region: Region, before: int
    ) -> Iterator[int]:
        for number in reversed(of.get((region.rank, region.memory), [])):
            one = self.all[number]
            other = one.source.area if of is self._read else one.destination.area
            if number < before and overlap(other, region.area):
                yield number
