"""Let requests arrive while an engine, or a simulator, serves them."""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Protocol

from llm_systems_cookbook.memory import Usage
from llm_systems_cookbook.serving.metrics import SLO, Recorder, Report
from llm_systems_cookbook.serving.request import Request, TokenOutput
from llm_systems_cookbook.serving.scheduler import (
    Batch,
    Counts,
    RequestRefused,
    Scheduler,
)
from llm_systems_cookbook.validate import require_at_least
from llm_systems_cookbook.workloads import Workload

OnStep = Callable[[float, Batch, Usage, list[TokenOutput]], None]


class Driver(Protocol):
    """What serves: an `Engine` or a `Simulator`.

    Attributes:
        scheduler: decides.
        last_batch: what the last step computed.
        step_seconds: how long that took.
        on_batch: called with a batch before it is computed, if not None.
    """

    scheduler: Scheduler
    last_batch: Batch | None
    step_seconds: float
    on_batch: Callable[[Batch], None] | None

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything to do."""

    def add(self, request: Request) -> None:
        """Queue a request."""

    def step(self) -> list[TokenOutput]:
        """Compute the next step."""


def replay(
    driver: Driver,
    requests: Iterable[Request],
    *,
    slo: SLO | None = None,
    max_steps: int | None = None,
    skip_refused: bool = False,
    on_step: OnStep | None = None,
) -> Report:
    """Serve requests as they arrive; return what was measured.

    The clock stands still between steps: each step adds its own duration,
    and an idle driver jumps to the next arrival. So a replay of an engine
    takes as long as its steps, and no longer. Requests that arrive during a
    step are added after it.

    Args:
        driver: with nothing to do; see `Driver`.
        requests: in order of arrival; read one by one, as time goes on.
        slo: what a request must keep to count as good.
        max_steps: stop after so many steps; default when all are served.
        skip_refused: count a request that can never run, and go on.
        on_step: called after each step with its end, batch, memory usage
            while it was computed, and outputs.

    Raises:
        ValueError: the driver has something to do, arrivals go back in time,
            max_steps is below 0, a request is refused, or the driver's clock
            goes back or is not finite.
    """
    if driver.has_unfinished:
        raise ValueError("replay needs a driver with nothing to do")
    if max_steps is not None:
        require_at_least(0, max_steps=max_steps)
    return _Replay(driver, requests, slo, skip_refused, on_step).run(max_steps)


class _Replay:
    def __init__(
        self,
        driver: Driver,
        requests: Iterable[Request],
        slo: SLO | None,
        skip_refused: bool,
        on_step: OnStep | None,
    ) -> None:
        self.driver = driver
        self.skip_refused = skip_refused
        self.on_step = on_step
        self.now = 0.0
        self.arrivals = iter(requests)
        self.next: Request | None = None
        self.usage = Usage(0, 0, 0, 0)
        self.observer: Callable[[Batch], None] | None = None
        self.recorder = Recorder(driver.scheduler.memory.capacity, slo)

    def run(self, max_steps: int | None) -> Report:
        report, before = self.recorder.report, asdict(self._counts)
        self.observer = self.driver.on_batch
        self.driver.on_batch = self._observe
        try:
            self._advance(0.0)
            while report.steps != max_steps and self._has_work():
                self._step()
        finally:
            self.driver.on_batch = self.observer
        after = asdict(self._counts)
        report.counts = Counts(**{k: after[k] - before[k] for k in after})
        return report

    @property
    def _counts(self) -> Counts:
        return self.driver.scheduler.counts

    def _observe(self, batch: Batch) -> None:
        self.usage = self.driver.scheduler.usage()
        if self.observer is not None:
            self.observer(batch)

    def _has_work(self) -> bool:
        """Add what has arrived; when nothing has, jump to the next."""
        self._add_arrived()
        while not self.driver.has_unfinished and self.next is not None:
            self.recorder.idle(self.next.arrival - self.now)
            self.now = self.next.arrival
            self._add_arrived()
        return self.driver.has_unfinished

    def _add_arrived(self) -> None:
        while self.next is not None and self.next.arrival <= self.now:
            self._add(self.next)
            self._advance(self.next.arrival)

    def _add(self, request: Request) -> None:
        try:
            self.driver.add(request)
        except RequestRefused:
            if not self.skip_refused:
                raise
            self.recorder.report.refused += 1
        else:
            self.recorder.arrived(request)

    def _advance(self, earliest: float) -> None:
        self.next = next(self.arrivals, None)
        if self.next is not None and self.next.arrival < earliest:
            raise ValueError(
                f"request {self.next.request_id!r} arrives at "
                f"{self.next.arrival}, the one before it at {earliest}"
            )

    def _step(self) -> None:
        outputs = self.driver.step()
        began, batch = self.now, self.driver.last_batch
        seconds = self.driver.step_seconds
        if not 0 <= seconds < math.inf:
            raise ValueError(
                f"step_seconds must be finite and >= 0, got {seconds}: the "
                f"driver's clock is wrong"
            )
        self.now += seconds
        self.recorder.step(began, seconds, batch, self.usage, outputs)
        if self.on_step is not None:
            self.on_step(self.now, batch, self.usage, outputs)


def requests_from(
    workload: Workload,
    *,
    max_new_tokens: int | None = None,
    vocab_size: int | None = None,
    seed: int = 0,
) -> Iterator[Request]:
    """Return a workload's requests, one by one, with lengths and arrivals.

    Args:
        workload: arrivals in seconds, input and output lengths.
        max_new_tokens: what each may generate at most; each one's own output
            when None. The output ends where the workload says.
        vocab_size: draw prompts from so many tokens; without it, prompts are
            ranges that take no memory, for a simulator.
        seed: of the prompts.

    Raises:
        ValueError: vocab_size below 1, or an output above max_new_tokens.
    """
    if vocab_size is not None:
        (vocab_size,) = require_at_least(1, vocab_size=vocab_size)
    return _requests(workload, max_new_tokens, vocab_size, seed)


def _requests(
    workload: Workload,
    max_new_tokens: int | None,
    vocab_size: int | None,
    seed: int,
) -> Iterator[Request]:
    rng = random.Random(seed)
    columns = workload.arrival_s, workload.input_len, workload.output_len
    for i, (arrival, prompt, output) in enumerate(zip(*columns, strict=True)):
        tokens: range | list[int] = range(int(prompt))
        if vocab_size is not None:
            tokens = rng.choices(range(vocab_size), k=int(prompt))
        yield Request(
            i,
            tokens,
            int(output) if max_new_tokens is None else max_new_tokens,
            arrival=float(arrival),
            output_len=int(output),
        )
