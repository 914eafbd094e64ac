"""How much of the KV memory holds no token: snapshots, bounds, over time."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from llm_systems_cookbook.memory.manager import MemoryManager, Usage
from llm_systems_cookbook.validate import (
    cdiv,
    require_at_least,
    require_each,
)
from llm_systems_cookbook.workloads import lognormal_lengths


class Waste(NamedTuple):
    """Share of the reserved slots that hold no token, in [0, 1].

    Attributes:
        reserve_max: when every sequence reserves the maximum.
        paged: when every sequence holds whole blocks.
    """

    reserve_max: float
    paged: float


def snapshot_waste(reserved_slots: ArrayLike, lengths: ArrayLike) -> float:
    """Return the share of reserved slots that hold no token.

    The denominator is what is reserved, not the tokens and not the pool.

    Args:
        reserved_slots: slots each sequence has reserved, [num_sequences].
        lengths: tokens each sequence holds, [num_sequences].

    Raises:
        ValueError: no sequences, other shapes, or a sequence that holds
            more tokens than it has reserved.
    """
    reserved, lengths = require_each(
        0, reserved_slots=reserved_slots, lengths=lengths
    )
    shape = reserved.shape
    if shape != lengths.shape or len(shape) != 1 or lengths.size == 0:
        raise ValueError(
            f"shapes {shape} and {lengths.shape}: need two equal [n], n >= 1"
        )
    if (lengths > reserved).any() or reserved.sum() == 0:
        raise ValueError("lengths must be in [0, reserved_slots]")
    return float(1 - lengths.sum() / reserved.sum())


def whole_blocks(lengths: ArrayLike, block_size: int) -> np.ndarray:
    """Return the slots of the blocks that hold each length, int64 [n].

    Raises:
        TypeError: a length or block_size is not an integer.
        ValueError: a length below 0, or block_size below 1.
    """
    (lengths,) = require_each(0, lengths=lengths)
    (block_size,) = require_at_least(1, block_size=block_size)
    return cdiv(lengths, block_size) * block_size


def simulate_workload(
    seed: int = 0,
    num_sequences: int = 100,
    mu: float = 4.5,
    sigma: float = 0.8,
    max_tokens: int = 4096,
    block_size: int = 16,
) -> Waste:
    """Compare reserving the maximum with paging on lognormal lengths.

    Every sequence is looked at once, at its final length.

    Args:
        seed: of the lengths.
        num_sequences: sequences in memory at once.
        mu: mean of the logarithm of the length.
        sigma: standard deviation of the logarithm of the length.
        max_tokens: what a reserving system sets aside for each, in slots.
        block_size: tokens per block.
    """
    lengths = lognormal_lengths(seed, num_sequences, mu, sigma, max_tokens)
    return Waste(
        reserve_max=snapshot_waste(np.full_like(lengths, max_tokens), lengths),
        paged=snapshot_waste(whole_blocks(lengths, block_size), lengths),
    )


def waste_bound(lengths: ArrayLike, block_size: int) -> float:
    """Return the most that paging can waste, as a share of the reserved.

    At most block_size - 1 slots of each sequence are empty, so the waste is
    at most (block_size - 1) / mean reserved slots. Equality holds only when
    every length is one more than a multiple of the block size.

    Raises:
        TypeError: a length or block_size is not an integer.
        ValueError: no lengths, or a length or block_size below 1.
    """
    (lengths,) = require_each(1, lengths=lengths)
    require_at_least(1, sequences=lengths.size, block_size=block_size)
    return (block_size - 1) / float(whole_blocks(lengths, block_size).mean())


def expected_waste(mean_length: float, block_size: int) -> float:
    """Return the waste to expect when any tail filling is equally likely.

    A tail block then has (block_size - 1) / 2 empty slots on average.

    Raises:
        TypeError: block_size is not an integer.
        ValueError: mean_length or block_size below 1.
    """
    (block_size,) = require_at_least(1, block_size=block_size)
    if not mean_length >= 1:  # so that NaN is refused, too
        raise ValueError(f"mean_length must be >= 1, got {mean_length}")
    empty = (block_size - 1) / 2
    return empty / (mean_length + empty)


@dataclass
class Occupancy:
    """What a memory held, summed over the steps of a run.

    Attributes:
        capacity: token slots in the pool.
        steps: iterations counted.
        slot_steps: Usage summed over the steps, in slots x steps.
        batch_steps: running requests summed over the steps.
        finished: requests that produced their whole output.
        preemptions: times a running request gave its memory back.
        recomputed_tokens: tokens that had to be held again after those.
    """

    capacity: int
    steps: int = 0
    slot_steps: Usage = field(default=Usage(0, 0, 0, 0))
    batch_steps: int = 0
    finished: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0

    def count(self, usage: Usage, batch: int) -> None:
        """Add one step."""
        self.steps += 1
        self.batch_steps += batch
        self.slot_steps = Usage(
            *(a + b for a, b in zip(self.slot_steps, usage, strict=True))
        )

    @property
    def mean_batch(self) -> float:
        """Requests running at once, averaged over the steps.

        Raises:
            ValueError: no step was counted.
        """
        require_at_least(1, steps=self.steps)
        return self.batch_steps / self.steps

    def percent(self) -> dict[str, float]:
        """Return the average split, in per cent of the whole pool.

        Raises:
            ValueError: no step was counted.
        """
        require_at_least(1, steps=self.steps)
        whole = self.capacity * self.steps
        split = self.slot_steps._asdict().items()
        return {name: 100 * slots / whole for name, slots in split}


@dataclass(slots=True)
class Sequence:
    """A request as memory sees it: how many tokens it holds and will hold."""

    request_id: int
    length: int
    final: int


def _as_sequences(
    lengths: Iterable[tuple[int, int]],
) -> Iterable[Sequence]:
    for i, (prompt, output) in enumerate(lengths):
        prompt, output = require_at_least(1, prompt=prompt, output=output)
        # The last sampled token is never written.
        yield Sequence(i, prompt, prompt + output - 1)


def time_weighted(
    memory: MemoryManager,
    lengths: Iterable[tuple[int, int]],
    num_steps: int | None = None,
) -> Occupancy:
    """Serve requests by the rule "one iteration, one token"; average usage.

    The queue is never empty: requests enter in order as soon as memory lets
    them. When a request cannot grow, the newest running one is preempted: it
    gives all its memory back, keeps its output, and is first in the queue.

    Args:
        memory: any memory manager, empty.
        lengths: (prompt, output) tokens of each request; may be endless.
        num_steps: stop after so many steps; default when all are served.

    Raises:
        TypeError: a length or num_steps is not an integer.
        ValueError: the memory is in use, a length is below 1, a request can
            never fit, or num_steps is below 0.
        RuntimeError: nothing runs, and the next request is refused.
    """
    if num_steps is not None:
        require_at_least(0, num_steps=num_steps)
    # Memory of others is never released here, so waiting might never end.
    if memory.usage().external < memory.capacity:
        raise ValueError(f"the memory is in use: {memory.usage()}")
    arrivals = iter(_as_sequences(lengths))
    waiting: deque[Sequence] = deque(islice(arrivals, 1))
    running: list[Sequence] = []
    seen = Occupancy(memory.capacity)
    while (waiting or running) and seen.steps != num_steps:
        while waiting and _admit(memory, waiting[0]):
            running.append(waiting.popleft())
            if not waiting:
                waiting.extend(islice(arrivals, 1))
        if not running:
            raise RuntimeError(
                f"nothing runs, and {waiting[0]} is refused: {memory.usage()}"
            )
        seen.count(memory.usage(), len(running))
        seen.finished += _release_finished(memory, running)
        for newest in _grow(memory, running):
            seen.preemptions += 1
            seen.recomputed_tokens += newest.length
            waiting.appendleft(newest)
    return seen


def _admit(memory: MemoryManager, sequence: Sequence) -> bool:
    if not memory.fits(sequence.final):
        raise ValueError(
            f"request {sequence.request_id}: {sequence.final} tokens can "
            f"never fit in {memory.capacity} slots"
        )
    return memory.admit(sequence.request_id, sequence.length, sequence.final)


def _release_finished(memory: MemoryManager, running: list[Sequence]) -> int:
    finished = [s for s in running if s.length == s.final]
    for sequence in finished:
        memory.release(sequence.request_id)
    running[:] = [s for s in running if s.length < s.final]
    return len(finished)


def _grow(memory: MemoryManager, running: list[Sequence]) -> list[Sequence]:
    """Grow each by a token, oldest first; return who was preempted.

    Newest first. The last one running is never preempted: it fits alone.
    """
    preempted = []
    grown = 0
    # By index, because the list gets shorter at its end meanwhile.
    while grown < len(running):
        if memory.grow(running[grown].request_id):
            running[grown].length += 1
            grown += 1
        else:
            preempted.append(running.pop())
            memory.release(preempted[-1].request_id)
    return preempted
