"""Four memories behind one protocol: reserve the maximum, or page.

A request holds some tokens now and more later. A memory manager answers one
question: is there room? Reserving memories answer it once, at admission.
Paged memory answers it again for every block.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar

from llm_systems_cookbook.memory.allocator import BlockAllocator, OutOfBlocks
from llm_systems_cookbook.memory.reservation import (
    BuddyRegions,
    NoFreeRegion,
    Regions,
    round_up_to_power_of_two,
)
from llm_systems_cookbook.memory.sequence_table import SequenceTable
from llm_systems_cookbook.validate import require_at_least

T = TypeVar("T")


class Usage(NamedTuple):
    """Where the slots of a pool are; the four parts add up to its capacity.

    The terms are those of section 3.1 and Fig. 2 of Kwon et al., SOSP 2023.
    The split of what a request holds needs its final length, known only to a
    simulation. Without it, `reserved` has all that may still be used.

    Attributes:
        token_states: slots that hold a token.
        reserved: slots that will hold a token of the request that has them.
        internal: slots of a request that it will never fill.
        external: slots that no request holds.
    """

    token_states: int
    reserved: int
    internal: int
    external: int


class MemoryManager(Protocol):
    """What a scheduler asks of memory, by request id and token counts.

    Each call takes effect as a whole or not at all. `admit` and `grow` take
    the memory at once, so what one request was promised, the next cannot
    get.
    """

    @property
    def capacity(self) -> int:
        """Token slots in the whole pool."""

    def fits(self, num_tokens: int) -> bool:
        """Tell whether a request of this final length will fit, if alone."""

    def admit(
        self,
        request_id: Hashable,
        num_tokens: int,
        final_tokens: int | None = None,
    ) -> bool:
        """Make room for a new request's tokens; False when there is none."""

    def grow(self, request_id: Hashable, num_tokens: int = 1) -> bool:
        """Make room for more tokens of a request; False when there is none."""

    def release(self, request_id: Hashable) -> None:
        """Give back all that a request holds."""

    def usage(self) -> Usage:
        """Return where the pool's slots are now."""


@dataclass(slots=True)
class _Reservation:
    start: int
    size: int
    held: int
    final: int | None


class ReservedMemory:
    """Reserve one contiguous region per request, at admission.

    Three policies, as in section 6.1 of Kwon et al., SOSP 2023:
    `max` reserves max_tokens for everyone; `pow2` reserves the prompt and
    the output rounded up to a power of two; `oracle` reserves the final
    length. The last two are told the final length, which no real system
    knows. A request never runs out of room later, so nothing is preempted.

    Args:
        num_slots: token slots in the pool, at least 1.
        max_tokens: longest request, prompt and output, at least 1.
        policy: "max", "pow2" or "oracle".
        regions: how regions are placed, BuddyRegions or FirstFitRegions.

    Raises:
        ValueError: a size below 1, or an unknown policy.
    """

    def __init__(
        self,
        num_slots: int,
        max_tokens: int,
        policy: Literal["max", "pow2", "oracle"] = "max",
        regions: type[Regions] = BuddyRegions,
    ) -> None:
        num_slots, max_tokens = require_at_least(
            1, num_slots=num_slots, max_tokens=max_tokens
        )
        if policy not in ("max", "pow2", "oracle"):
            raise ValueError(
                f"policy must be max, pow2 or oracle, got {policy!r}"
            )
        self.max_tokens = max_tokens
        self.policy = policy
        self.regions = regions(num_slots)
        self._reservations: dict[Hashable, _Reservation] = {}

    @property
    def capacity(self) -> int:
        """Token slots in the whole pool."""
        return self.regions.num_slots

    def fits(self, num_tokens: int) -> bool:
        """Tell whether a request of this final length will fit, if alone.

        How much `pow2` rounds up depends on the prompt: the least favourable
        one, a single token, decides.
        """
        (num_tokens,) = require_at_least(1, num_tokens=num_tokens)
        if num_tokens > self.max_tokens:
            return False
        return self.regions.ever_fits(self._size(1, num_tokens))

    def admit(
        self,
        request_id: Hashable,
        num_tokens: int,
        final_tokens: int | None = None,
    ) -> bool:
        """Reserve a region; False when no hole is large enough.

        Args:
            request_id: a name not in use.
            num_tokens: tokens to hold now (the prompt), at least 1.
            final_tokens: tokens held at the end; `pow2` and `oracle` need it.

        Raises:
            ValueError: the id is in use, lengths out of order or above
                max_tokens, or a final length missing.
        """
        num_tokens, final_tokens = _check_new(
            self._reservations, request_id, num_tokens, final_tokens
        )
        size = self._size(num_tokens, final_tokens)
        try:
            start = self.regions.allocate(size)
        except NoFreeRegion:
            return False
        self._reservations[request_id] = _Reservation(
            start, size, num_tokens, final_tokens
        )
        return True

    def _size(self, num_tokens: int, final_tokens: int | None) -> int:
        longest = num_tokens if final_tokens is None else final_tokens
        if longest > self.max_tokens:
            raise ValueError(f"{longest} tokens, maximum {self.max_tokens}")
        if self.policy == "max":
            return self.max_tokens
        if final_tokens is None:
            raise ValueError(f"policy {self.policy} needs final_tokens")
        if self.policy == "oracle":
            return final_tokens
        # The last sampled token is never written: output = written + 1.
        output = final_tokens - num_tokens + 1
        rounded = num_tokens + round_up_to_power_of_two(output)
        return min(rounded, self.max_tokens)

    def grow(self, request_id: Hashable, num_tokens: int = 1) -> bool:
        """Use more of a request's own region; there is always room in it.

        Raises:
            KeyError: unknown request.
            ValueError: num_tokens below 0, or past the end of the region.
        """
        (num_tokens,) = require_at_least(0, num_tokens=num_tokens)
        reservation = _get(self._reservations, request_id)
        held = reservation.held + num_tokens
        if held > reservation.size:
            raise ValueError(
                f"request {request_id!r}: {held} tokens in a reservation "
                f"of {reservation.size}"
            )
        reservation.held = held
        return True

    def release(self, request_id: Hashable) -> None:
        """Give back a request's region.

        Raises:
            KeyError: unknown request.
        """
        self.regions.free(_get(self._reservations, request_id).start)
        del self._reservations[request_id]

    def usage(self) -> Usage:
        """Return where the pool's slots are now.

        The slots that a buddy allocator adds by rounding a region up count
        as external, as in the paper.
        """
        token_states = reserved = internal = 0
        for region in self._reservations.values():
            final = region.size if region.final is None else region.final
            token_states += region.held
            reserved += max(final, region.held) - region.held
            internal += region.size - max(final, region.held)
        held = token_states + reserved + internal
        return Usage(token_states, reserved, internal, self.capacity - held)


class PagedMemory:
    """Give each request a block when it needs one.

    The only owner of its allocator. A request's final length is used for
    accounting alone, never to decide.

    Args:
        allocator: the pool; nothing else may take or free its blocks.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self._tables: dict[Hashable, SequenceTable] = {}
        self._finals: dict[Hashable, int | None] = {}

    @property
    def capacity(self) -> int:
        """Token slots in the whole pool."""
        return self.allocator.num_blocks * self.allocator.block_size

    def fits(self, num_tokens: int) -> bool:
        """Tell whether a request of this final length will fit, if alone."""
        require_at_least(1, num_tokens=num_tokens)
        needed = self.allocator.blocks_needed(num_tokens)
        return needed <= self.allocator.num_blocks

    def admit(
        self,
        request_id: Hashable,
        num_tokens: int,
        final_tokens: int | None = None,
    ) -> bool:
        """Take blocks for a new request; False when too few are free.

        Args:
            request_id: a name not in use.
            num_tokens: tokens to hold now, at least 1.
            final_tokens: tokens held at the end, for `usage` alone.

        Raises:
            ValueError: the id is in use, or lengths out of order.
        """
        num_tokens, final_tokens = _check_new(
            self._tables, request_id, num_tokens, final_tokens
        )
        table = SequenceTable(self.allocator.block_size)
        try:
            table.extend(self.allocator, num_tokens)
        except OutOfBlocks:
            return False
        self._tables[request_id] = table
        self._finals[request_id] = final_tokens
        return True

    def grow(self, request_id: Hashable, num_tokens: int = 1) -> bool:
        """Make room for more tokens; False when too few blocks are free.

        Raises:
            KeyError: unknown request.
            ValueError: num_tokens below 0.
        """
        table = self.table(request_id)
        try:
            # Every decode step: take the short way.
            if isinstance(num_tokens, int) and num_tokens == 1:
                copies = table.append(self.allocator)
            else:
                copies = table.extend(self.allocator, num_tokens)
        except OutOfBlocks:
            return False
        # Requests share no block, so there are no contents to copy.
        assert not copies, f"request {request_id!r} shares its tail"
        return True

    def release(self, request_id: Hashable) -> None:
        """Give back a request's blocks.

        Raises:
            KeyError: unknown request.
        """
        self.table(request_id).free(self.allocator)
        del self._tables[request_id], self._finals[request_id]

    def table(self, request_id: Hashable) -> SequenceTable:
        """Return a request's block table, to read.

        Raises:
            KeyError: unknown request.
        """
        return _get(self._tables, request_id)

    def usage(self) -> Usage:
        """Return where the pool's slots are now."""
        token_states = reserved = internal = 0
        for request_id, table in self._tables.items():
            final = self._finals[request_id]
            end = table.capacity
            if final is not None:
                end = min(end, max(final, table.length))
            token_states += table.length
            reserved += end - table.length
            internal += table.capacity - end
        held = token_states + reserved + internal
        return Usage(token_states, reserved, internal, self.capacity - held)


def _check_new(
    known: Mapping[Hashable, object],
    request_id: Hashable,
    num_tokens: int,
    final_tokens: int | None,
) -> tuple[int, int | None]:
    """Return the lengths as integers; refuse an id in use, a wrong order."""
    if request_id in known:
        raise ValueError(f"request {request_id!r} is already in memory")
    (num_tokens,) = require_at_least(1, num_tokens=num_tokens)
    if final_tokens is not None:
        (final_tokens,) = require_at_least(
            num_tokens, final_tokens=final_tokens
        )
    return num_tokens, final_tokens


def _get(known: Mapping[Hashable, T], request_id: Hashable) -> T:
    """Look a request up, with an error that names it."""
    if request_id not in known:
        raise KeyError(f"request {request_id!r} is not in memory")
    return known[request_id]
