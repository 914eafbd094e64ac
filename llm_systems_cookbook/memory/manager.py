"""What a scheduler asks of memory, and where the slots of a pool are.

A request holds some tokens now and more later. A memory manager answers one
question: is there room? Memory that reserves answers it once, at admission.
Paged memory answers it again for every block.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple, Protocol, TypeVar

from llm_systems_cookbook.memory.sequence_table import BlockCopy
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
    the memory at once, so the next request cannot get what was promised to
    this one.
    """

    block_size: int
    """Slots that are handed out together."""

    shares_blocks: bool
    """Whether requests can share blocks: then it is a `SharingMemory`."""

    @property
    def capacity(self) -> int:
        """Token slots in the whole pool."""

    def fits(
        self, num_tokens: int, samples: int = 1, shared_tokens: int = 0
    ) -> bool:
        """Tell whether a request of this final length will fit, if alone."""

    def admit(
        self,
        request_id: Hashable,
        num_tokens: int,
        final_tokens: int | None = None,
        keep_free: int = 0,
    ) -> bool:
        """Make room for a new request's tokens; False when there is none."""

    def grow(self, request_id: Hashable, num_tokens: int = 1) -> bool:
        """Make room for more tokens of a request; False when there is none."""

    def release(self, request_id: Hashable) -> None:
        """Give back all that a request holds."""

    @property
    def request_ids(self) -> set[Hashable]:
        """Requests that hold memory."""

    def length(self, request_id: Hashable) -> int:
        """Return for how many tokens a request has room."""

    def block_ids(self, request_id: Hashable) -> list[int] | range:
        """Return a request's blocks, in the order of its tokens."""

    def usage(self) -> Usage:
        """Return where the pool's slots are now."""

    def assert_consistent(self) -> None:
        """Check that what is in use is what requests hold."""


class SharingMemory(MemoryManager, Protocol):
    """What a scheduler asks in addition where `shares_blocks` is true.

    Samples of a request then share its prompt. A preempted request may be
    moved to the host, and then it need not be computed again.
    """

    def fork(self, request_id: Hashable, new_id: Hashable) -> None:
        """Let a new request share all blocks of another; takes none."""

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies to make before the next write, and forget them."""

    def swap_out(
        self, request_ids: Iterable[Hashable]
    ) -> list[BlockCopy] | None:
        """Move requests to the host; None when it has too little room."""

    def swap_in(
        self, request_ids: Iterable[Hashable], keep_free: int = 0
    ) -> list[BlockCopy] | None:
        """Move requests back; None when too few blocks are free."""

    def growth_after_swap_in(self, lengths: Mapping[Hashable, int]) -> int:
        """Return the blocks that requests take once they are back."""


# --- What every memory checks ------------------------------------------------


def checked_lengths(
    num_tokens: int, final_tokens: int | None
) -> tuple[int, int | None]:
    """Return the lengths as integers; refuse a wrong order."""
    (num_tokens,) = require_at_least(1, num_tokens=num_tokens)
    if final_tokens is not None:
        (final_tokens,) = require_at_least(
            num_tokens, final_tokens=final_tokens
        )
    return num_tokens, final_tokens


def require_unknown(
    known: Mapping[Hashable, object], request_id: Hashable
) -> None:
    """Refuse an id in use, with an error that names it."""
    if request_id in known:
        raise ValueError(f"request {request_id!r} is already in memory")


def get_known(known: Mapping[Hashable, T], request_id: Hashable) -> T:
    """Look a request up, with an error that names it."""
    if request_id not in known:
        raise KeyError(f"request {request_id!r} is not in memory")
    return known[request_id]
