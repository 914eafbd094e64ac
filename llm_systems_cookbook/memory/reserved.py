"""Memory before paging: one unbroken region per request, at admission."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from llm_systems_cookbook.memory.manager import (
    Usage,
    checked_lengths,
    get_known,
    require_unknown,
)
from llm_systems_cookbook.memory.reservation import (
    BuddyRegions,
    NoFreeRegion,
    Regions,
    round_up_to_power_of_two,
)
from llm_systems_cookbook.validate import require_at_least


@dataclass(slots=True)
class _Reservation:
    start: int
    size: int
    length: int
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

    Attributes:
        block_size: 1, so a region is a block table of consecutive slots.

    Raises:
        ValueError: a size below 1, or an unknown policy.
    """

    block_size = 1
    shares_blocks = False

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

    def fits(
        self, num_tokens: int, samples: int = 1, shared_tokens: int = 0
    ) -> bool:
        """Tell whether a request of this final length will fit, if alone.

        Samples share nothing here: each takes a region of its own.

        Args:
            num_tokens: tokens of each sample at its end, at least 1.
            samples: sequences of the request, at least 1.
            shared_tokens: its prompt. How much `pow2` rounds up depends on
                it; without it, the least favourable prompt decides.
        """
        num_tokens, samples = require_at_least(
            1, num_tokens=num_tokens, samples=samples
        )
        (prompt,) = require_at_least(0, shared_tokens=shared_tokens)
        if num_tokens > self.max_tokens:
            return False
        if prompt == 0:
            # It is not known, so the promise must hold for every prompt.
            prompt = _least_favourable_prompt(num_tokens)
        size = self._size(min(prompt, num_tokens), num_tokens)
        if samples == 1:
            return self.regions.ever_fits(size)
        # We try it on an empty pool, because buddies are aligned: a division
        # does not tell how many regions fit beside each other.
        empty = type(self.regions)(self.capacity)
        try:
            for _ in range(samples):
                empty.allocate(size)
        except NoFreeRegion:
            return False
        return True

    def admit(
        self,
        request_id: Hashable,
        num_tokens: int,
        final_tokens: int | None = None,
        keep_free: int = 0,
    ) -> bool:
        """Reserve a region; False when no hole is large enough.

        Args:
            request_id: a name not in use.
            num_tokens: tokens to hold now (the prompt), at least 1.
            final_tokens: tokens held at the end; `pow2` and `oracle` need it.
            keep_free: not used, because no request grows out of its region.

        Raises:
            ValueError: the id is in use, lengths out of order or above
                max_tokens, or a final length missing.
        """
        require_unknown(self._reservations, request_id)
        num_tokens, final_tokens = checked_lengths(num_tokens, final_tokens)
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
        # Only the output is rounded: the prompt's length is known.
        rounded = num_tokens + round_up_to_power_of_two(output)
        return min(rounded, self.max_tokens)

    def grow(self, request_id: Hashable, num_tokens: int = 1) -> bool:
        """Use more of a request's own region; there is always room in it.

        Raises:
            KeyError: unknown request.
            ValueError: num_tokens below 0, or past the end of the region.
        """
        (num_tokens,) = require_at_least(0, num_tokens=num_tokens)
        reservation = get_known(self._reservations, request_id)
        length = reservation.length + num_tokens
        # An error, because the caller broke its promise. False would ask it
        # to preempt others, and that would not make this region larger.
        if length > reservation.size:
            raise ValueError(
                f"request {request_id!r}: {length} tokens in a reservation "
                f"of {reservation.size}"
            )
        reservation.length = length
        return True

    def release(self, request_id: Hashable) -> None:
        """Give back a request's region.

        Raises:
            KeyError: unknown request.
        """
        self.regions.free(get_known(self._reservations, request_id).start)
        del self._reservations[request_id]

    @property
    def request_ids(self) -> set[Hashable]:
        """Requests that hold memory."""
        return set(self._reservations)

    def length(self, request_id: Hashable) -> int:
        """Return how many tokens of its region a request uses.

        Raises:
            KeyError: unknown request.
        """
        return get_known(self._reservations, request_id).length

    def block_ids(self, request_id: Hashable) -> range:
        """Return the slots that a request uses: blocks of one token each.

        Raises:
            KeyError: unknown request.
        """
        region = get_known(self._reservations, request_id)
        return range(region.start, region.start + region.length)

    def assert_consistent(self) -> None:
        """Check the pool, and that each region in use is a request's.

        Raises:
            AssertionError: naming what is wrong.
        """
        self.regions.assert_consistent()
        ours = sorted(r.start for r in self._reservations.values())
        used = sorted(self.regions.used_starts)
        if ours != used:
            raise AssertionError(
                f"regions {used} are in use, those of requests: {ours}"
            )

    def usage(self) -> Usage:
        """Return where the pool's slots are now.

        The slots that a buddy allocator adds by rounding a region up count
        as external, as in the paper.
        """
        token_states = reserved = internal = 0
        for region in self._reservations.values():
            final = region.size if region.final is None else region.final
            # It may grow past the length it announced, to the region's end.
            final = max(final, region.length)
            token_states += region.length
            reserved += final - region.length
            internal += region.size - final
        taken = token_states + reserved + internal
        return Usage(token_states, reserved, internal, self.capacity - taken)


def _least_favourable_prompt(num_tokens: int) -> int:
    """Return the prompt whose output, up to this length, `pow2` rounds most.

    An output of one more than a power of two is rounded up to the next.
    """
    if num_tokens == 1:
        return 1
    output = round_up_to_power_of_two(num_tokens) // 2 + 1
    return num_tokens - output + 1
