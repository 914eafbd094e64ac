"""The scheduler without a model: a clock says how long a step takes."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from llm_systems_cookbook.serving.guard import Guard, one_step, one_thread
from llm_systems_cookbook.serving.request import Request, TokenOutput
from llm_systems_cookbook.serving.scheduler import Batch, Scheduler

Clock = Callable[[Batch], float]


def one_iteration(batch: Batch) -> float:
    """Return 1: time counted in iterations, one token each."""
    return 1.0


class StepTime(NamedTuple):
    """A measured step.

    Attributes:
        num_tokens: tokens computed.
        kv_tokens: keys and values read, in tokens, over all sequences.
        seconds: how long it took.
    """

    num_tokens: int
    kv_tokens: int
    seconds: float

    @classmethod
    def of(cls, batch: Batch, seconds: float) -> "StepTime":
        """Return what a clock can be fitted to."""
        return cls(batch.num_tokens, _kv_tokens(batch), seconds)


def _kv_tokens(batch: Batch) -> int:
    return sum(entry.end for entry in batch.entries)


@dataclass(frozen=True)
class LinearClock:
    """A step takes a fixed time, and more per token and per token read.

    Attributes:
        per_step: seconds of any step.
        per_token: seconds per token computed.
        per_kv_token: seconds per key and value read.

    Raises:
        ValueError: a negative or non-finite time, or all of them 0.
    """

    per_step: float
    per_token: float = 0.0
    per_kv_token: float = 0.0

    def __post_init__(self) -> None:
        times = self.per_step, self.per_token, self.per_kv_token
        if not all(0 <= t < np.inf for t in times) or sum(times) == 0:
            raise ValueError(
                f"times must be finite, >= 0 and not all 0, got {times}"
            )

    def __call__(self, batch: Batch) -> float:
        """Return the seconds of a step."""
        return (
            self.per_step
            + self.per_token * batch.num_tokens
            + self.per_kv_token * _kv_tokens(batch)
        )

    @classmethod
    def fit(cls, steps: Iterable[StepTime]) -> "LinearClock":
        """Return the clock nearest to measured steps (least squares).

        No time is negative: of all ways to set some to 0, the nearest with
        no negative one is taken.

        Raises:
            ValueError: fewer than three steps, steps that took no time, or
                one of a negative or non-finite number.
        """
        rows = np.array(list(steps), dtype=np.float64)
        if len(rows) < 3:
            raise ValueError(f"needs at least 3 steps, got {len(rows)}")
        bad = ~((rows >= 0) & (rows < np.inf)).all(axis=1)
        if bad.any():
            raise ValueError(
                f"a step must be finite and >= 0, got {rows[bad][0].tolist()}"
            )
        columns = np.column_stack([np.ones(len(rows)), rows[:, :2]])
        best, times = math.inf, np.zeros(3)
        for used in _subsets(3):
            fitted, *_ = np.linalg.lstsq(columns[:, used], rows[:, 2])
            error = np.square(columns[:, used] @ fitted - rows[:, 2]).sum()
            if fitted.min() >= 0 and error < best:
                best, times = error, np.zeros(3)
                times[used] = fitted
        return cls(*times.tolist())


def _subsets(n: int) -> Iterator[list[int]]:
    """Yield the subsets of the first n numbers, all but the empty one."""
    for size in range(n, 0, -1):
        yield from map(list, combinations(range(n), size))


class Simulator:
    """Drive a scheduler by a clock; every token it generates is 0.

    Requests end by `output_len` or `max_new_tokens`. Like an engine,
    it is for one thread at a time.

    Args:
        scheduler: as an engine takes it.
        clock: seconds of a batch.

    Attributes:
        last_batch: what the last step would have computed.
        step_seconds: how long it would have taken.
        on_batch: called with a batch before its tokens are there, if set.
    """

    def __init__(
        self, scheduler: Scheduler, clock: Clock = one_iteration
    ) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self.last_batch: Batch | None = None
        self.step_seconds = 0.0
        self.on_batch: Callable[[Batch], None] | None = None
        self._guard = Guard()

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is running, preempted or waiting."""
        return self.scheduler.has_unfinished

    @one_thread
    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: see `Scheduler.add`, or the request has stop tokens:
                nothing here says when one would come.
        """
        if request.stop_token_ids:
            raise ValueError(
                f"request {request.request_id!r} has stop tokens: give "
                f"output_len instead"
            )
        self.scheduler.add(request)

    @one_step
    def step(self) -> list[TokenOutput]:
        """Pretend to compute the next step.

        Raises:
            RuntimeError: called from within a step, by `on_batch`; or see
                `Scheduler.schedule`.
        """
        batch = self.scheduler.schedule()
        if self.on_batch is not None:
            self.on_batch(batch)
        batch.drop_aborted()
        self.step_seconds = self.clock(batch)
        self.last_batch = batch
        return self.scheduler.update(batch, [0] * len(batch.sampled))
