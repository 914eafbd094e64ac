"""Contiguous regions: how KV memory was handed out before paging.

A request gets one unbroken run of slots, so free memory splits into holes.
Two classic ways of choosing the run, with one interface.
"""

import bisect

from llm_systems_cookbook.validate import require_at_least


class NoFreeRegion(RuntimeError):
    """Raised when no hole is large enough for a region.

    Attributes:
        needed: slots the region takes.
        free: free slots in all holes together.
        largest: slots in the largest hole.
    """

    def __init__(self, needed: int, free: int, largest: int) -> None:
        super().__init__(needed, free, largest)
        self.needed, self.free, self.largest = needed, free, largest

    def __str__(self) -> str:
        return (
            f"needed a region of {self.needed} slots; "
            f"{self.free} free, largest hole {self.largest}"
        )


def round_up_to_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`.

    Raises:
        TypeError: n is not an integer.
        ValueError: n below 1.
    """
    (n,) = require_at_least(1, n=n)
    return 1 << (n - 1).bit_length()


class _Used:
    """The regions in use, by their first slot, whoever places them."""

    def __init__(self, num_slots: int) -> None:
        (self.num_slots,) = require_at_least(1, num_slots=num_slots)
        self._used: dict[int, int] = {}

    @property
    def used_starts(self) -> list[int]:
        """First slots of the regions in use."""
        return list(self._used)

    def _give_up(self, start: int) -> tuple[int, int]:
        """Return a region's first slot and its size; it is not used now."""
        if start not in self._used:
            raise ValueError(f"no region in use starts at slot {start}")
        # A dict finds 4.0 under 4, but the arithmetic needs an integer.
        (start,) = require_at_least(0, start=start)
        return start, self._used.pop(start)


class BuddyRegions(_Used):
    """Regions whose sizes are powers of two, split and merged in halves.

    A pool of any size starts as one free region per set bit of `num_slots`,
    largest first. A region is aligned to its own size, so its buddy, the
    other half of the region that both came from, is at `start ^ size`.

    Source: the earlier systems in Fig. 2 of Kwon et al., SOSP 2023, allocate
    from a buddy allocator (Knuth, The Art of Computer Programming, 2.5).

    Args:
        num_slots: token slots in the pool, at least 1.

    Raises:
        ValueError: num_slots below 1.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._free: dict[int, set[int]] = {}
        # Largest first, so that each region starts at a multiple of its size:
        # only then is the buddy's start one flipped bit away.
        start = 0
        for bit in reversed(range(self.num_slots.bit_length())):
            size = 1 << bit
            self._free[size] = set()
            if self.num_slots & size:
                self._free[size].add(start)
                start += size

    @property
    def free_slots(self) -> int:
        """Slots in all free regions together."""
        return self.num_slots - sum(self._used.values())

    @property
    def largest_hole(self) -> int:
        """Slots in the largest free region; 0 when there is none."""
        return max(
            (s for s, starts in self._free.items() if starts), default=0
        )

    def region_size(self, size: int) -> int:
        """Return the slots that a region for `size` tokens takes."""
        return round_up_to_power_of_two(size)

    def ever_fits(self, size: int) -> bool:
        """Tell whether an empty pool has room for a region of `size`."""
        return self.region_size(size) in self._free

    def allocate(self, size: int) -> int:
        """Take a region for `size` tokens and return its first slot.

        Raises:
            NoFreeRegion: no free region is large enough.
            ValueError: size below 1.
        """
        wanted = self.region_size(size)
        if self.largest_hole < wanted:
            raise NoFreeRegion(wanted, self.free_slots, self.largest_hole)
        found = wanted
        while not self._free[found]:
            found *= 2
        # The lowest, so that the order of a set does not decide.
        start = min(self._free[found])
        self._free[found].remove(start)
        while found > wanted:
            found //= 2
            self._free[found].add(start + found)
        self._used[start] = wanted
        return start

    def free(self, start: int) -> None:
        """Give a region back and merge it with its buddy while that is free.

        Raises:
            TypeError: start is not an integer.
            ValueError: no region in use starts there.
        """
        start, size = self._give_up(start)
        while start ^ size in self._free[size]:
            self._free[size].remove(start ^ size)
            start = min(start, start ^ size)
            size *= 2
        self._free[size].add(start)

    def assert_consistent(self) -> None:
        """Check that regions tile the pool and no free buddies are left.

        Raises:
            AssertionError: naming the slot or the pair that is wrong.
        """
        holes = [(a, s) for s, starts in self._free.items() for a in starts]
        _assert_tiles(holes, self._used, self.num_slots)
        for start, size in holes:
            if start ^ size in self._free[size]:
                raise AssertionError(
                    f"free buddies of {size} slots at {start} and "
                    f"{start ^ size} were not merged"
                )


class FirstFitRegions(_Used):
    """Regions of exactly the size asked for, from the first hole that fits.

    Args:
        num_slots: token slots in the pool, at least 1.

    Raises:
        ValueError: num_slots below 1.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._holes: list[tuple[int, int]] = [(0, self.num_slots)]

    @property
    def free_slots(self) -> int:
        """Slots in all holes together."""
        return sum(size for _, size in self._holes)

    @property
    def largest_hole(self) -> int:
        """Slots in the largest hole; 0 when there is none."""
        return max((size for _, size in self._holes), default=0)

    def region_size(self, size: int) -> int:
        """Return the slots that a region for `size` tokens takes."""
        (size,) = require_at_least(1, size=size)
        return size

    def ever_fits(self, size: int) -> bool:
        """Tell whether an empty pool has room for a region of `size`."""
        return self.region_size(size) <= self.num_slots

    def allocate(self, size: int) -> int:
        """Take a region for `size` tokens and return its first slot.

        Raises:
            NoFreeRegion: no hole is large enough.
            ValueError: size below 1.
        """
        (size,) = require_at_least(1, size=size)
        for i, (start, hole) in enumerate(self._holes):
            if hole >= size:
                rest = [(start + size, hole - size)] if hole > size else []
                self._holes[i : i + 1] = rest
                self._used[start] = size
                return start
        raise NoFreeRegion(size, self.free_slots, self.largest_hole)

    def free(self, start: int) -> None:
        """Give a region back and merge it with the holes on either side.

        Raises:
            TypeError: start is not an integer.
            ValueError: no region in use starts there.
        """
        start, size = self._give_up(start)
        # The right hole first, because removing the left one would shift it.
        i = bisect.bisect(self._holes, (start, 0))
        if i < len(self._holes) and self._holes[i][0] == start + size:
            size += self._holes.pop(i)[1]
        if i > 0 and sum(self._holes[i - 1]) == start:
            i -= 1
            left_start, left_size = self._holes.pop(i)
            start, size = left_start, left_size + size
        self._holes.insert(i, (start, size))

    def assert_consistent(self) -> None:
        """Check that regions tile the pool and no holes touch.

        Raises:
            AssertionError: naming the slot or the pair that is wrong.
        """
        _assert_tiles(self._holes, self._used, self.num_slots)
        for left, right in zip(self._holes, self._holes[1:], strict=False):
            if sum(left) == right[0]:
                raise AssertionError(f"holes {left} and {right} not merged")


Regions = BuddyRegions | FirstFitRegions


def _assert_tiles(
    holes: list[tuple[int, int]], used: dict[int, int], num_slots: int
) -> None:
    """Check that holes and regions cover every slot exactly once."""
    next_slot = 0
    for start, size in sorted([*holes, *used.items()]):
        if start != next_slot or size < 1:
            raise AssertionError(
                f"slot {next_slot}: next region is {size} slots at {start}"
            )
        next_slot = start + size
    if next_slot != num_slots:
        raise AssertionError(f"regions end at {next_slot}, not {num_slots}")
