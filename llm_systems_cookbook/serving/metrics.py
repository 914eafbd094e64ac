"""What users feel and what an operator pays for.

Latencies go into histograms, so a report is as large for a hundred requests
as for a million.
"""

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from llm_systems_cookbook.memory import Usage
from llm_systems_cookbook.serving.request import Request, TokenOutput
from llm_systems_cookbook.serving.scheduler import Batch, Counts
from llm_systems_cookbook.validate import require_at_least, require_number

GROWTH = 1.02  # of a histogram's bins: a quantile is off by at most 1 %


class Histogram:
    """Count numbers in bins that grow by 2 %; mean and extremes are exact."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.minimum = math.inf
        self.maximum = -math.inf
        self._bins: Counter[float] = Counter()

    def add(self, value: float, count: int = 1) -> None:
        """Count a value so many times.

        Raises:
            ValueError: the value is negative or not finite, or the count is
                below 1. Nothing was counted.
        """
        value = float(value)
        if not 0 <= value < math.inf:
            raise ValueError(f"value must be finite, >= 0, got {value}")
        (count,) = require_at_least(1, count=count)
        self.count += count
        self.total += value * count
        self.minimum = min(self.minimum, value)
        self.maximum = max(self.maximum, value)
        self._bins[_bin(value)] += count

    @property
    def mean(self) -> float:
        """Mean of the values; NaN when there are none."""
        return self.total / self.count if self.count else math.nan

    def percentile(self, percent: float) -> float:
        """Return what so many per cent of the values are at or below.

        Off by at most 1 % of it; NaN when there are no values.

        Raises:
            ValueError: percent outside [0, 100].
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"percent must be in [0, 100], got {percent}")
        if self.count == 0:
            return math.nan
        # Rounded first: as floats, 16.1 per cent of 1,000 are a little more
        # than 161, and would become 162.
        rank = max(1, math.ceil(round(percent * self.count / 100, 6)))
        seen = 0
        for number in sorted(self._bins):
            seen += self._bins[number]
            if seen >= rank:
                break
        return min(max(_middle(number), self.minimum), self.maximum)


def _bin(value: float) -> float:
    if value == 0:
        return -math.inf
    return math.floor(math.log(value, GROWTH))


def _middle(number: float) -> float:
    return 0.0 if number == -math.inf else GROWTH ** (number + 0.5)


class SLO(NamedTuple):
    """A service-level objective: what a request must keep to count as good.

    Attributes:
        ttft: time to first token, in seconds, at most.
        inter_token: mean time between tokens of a sample, at most.
    """

    ttft: float
    inter_token: float


def _require_limits(slo: SLO) -> None:
    limits = slo._asdict()
    require_number(**limits)
    for name, limit in limits.items():
        if not limit >= 0:
            raise ValueError(f"{name} of an SLO must be >= 0, got {limit}")


@dataclass
class Report:
    """What a run measured. Times are in seconds, or in the clock's unit.

    Attributes:
        capacity: token slots in the pool.
        slo: the objective for `good`; None when there is none.
        steps: steps computed.
        seconds: length of the run, waiting for arrivals included.
        busy_seconds: length of the steps.
        requests: requests finished.
        good: requests finished within the objective.
        refused: requests that could never run.
        failed: requests that ended with an error.
        computed_tokens: tokens computed, again after a preemption, too.
        output_tokens: tokens generated.
        ttft: arrival to first token, per request.
        inter_token: between two tokens of a sample.
        latency: arrival to last token, per request.
        queueing: arrival to the first step that runs the request.
        slot_seconds: where the slots were, in slots x seconds.
        batch_seconds: samples computed in a step x its seconds.
        counts: what the scheduler did during the run.
    """

    capacity: int
    slo: SLO | None = None
    steps: int = 0
    seconds: float = 0.0
    busy_seconds: float = 0.0
    requests: int = 0
    good: int = 0
    refused: int = 0
    failed: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    inter_token: Histogram = field(default_factory=Histogram)
    latency: Histogram = field(default_factory=Histogram)
    queueing: Histogram = field(default_factory=Histogram)
    slot_seconds: list[float] = field(default_factory=lambda: [0.0] * 4)
    batch_seconds: float = 0.0
    counts: Counts = field(default_factory=Counts)

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return _ratio(self.output_tokens, self.seconds)

    @property
    def goodput(self) -> float:
        """Requests per second that kept the objective.

        Raises:
            ValueError: no objective was stated.
        """
        if self.slo is None:
            raise ValueError("no SLO was stated for this run")
        return _ratio(self.good, self.seconds)

    @property
    def mean_batch(self) -> float:
        """Samples computed in a step, averaged over the time of the steps."""
        return _ratio(self.batch_seconds, self.busy_seconds)

    @property
    def preemptions_per_request(self) -> float:
        """Preemptions per finished request."""
        return _ratio(self.counts.preemptions, self.requests)

    @property
    def kv_occupancy(self) -> float:
        """Slots that held a token, in per cent of pool x busy time."""
        return self.percent()["token_states"]

    def percent(self) -> dict[str, float]:
        """Return where the slots were, in per cent of pool x busy time."""
        whole = self.capacity * self.busy_seconds
        return {
            name: 100 * _ratio(slots, whole)
            for name, slots in zip(
                Usage._fields, self.slot_seconds, strict=True
            )
        }

    def as_dict(self) -> dict[str, float]:
        """Return the figures that a comparison wants, by name."""
        figures = {
            "requests": self.requests,
            "throughput": self.throughput,
            "mean_batch": self.mean_batch,
            "kv_occupancy": self.kv_occupancy,
            "preemptions_per_request": self.preemptions_per_request,
            "recomputed_tokens": self.counts.recomputed_tokens,
        }
        for name in ("ttft", "inter_token", "latency", "queueing"):
            histogram: Histogram = getattr(self, name)
            for percent in (50, 90, 99):
                figures[f"{name}_p{percent}"] = histogram.percentile(percent)
        return figures


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


@dataclass(slots=True)
class _Open:
    """An unfinished request, as the recorder follows it."""

    request: Request
    first: float | None = None
    last: dict[int, float] = field(default_factory=dict)
    gaps: float = 0.0
    num_gaps: int = 0
    left: int = 0
    failed: bool = False


class Recorder:
    """Turn a run's steps into a report; remembers unfinished requests only.

    Args:
        capacity: token slots in the pool.
        slo: what a request must keep to count as good.

    Raises:
        TypeError: a limit of the SLO is not a number.
        ValueError: a limit of the SLO is below 0, or NaN.
    """

    def __init__(self, capacity: int, slo: SLO | None = None) -> None:
        if slo is not None:
            _require_limits(slo)
        self.report = Report(capacity, slo)
        self._open: dict[Hashable, _Open] = {}

    def arrived(self, request: Request) -> None:
        """Follow a request from now on."""
        self._open[request.request_id] = _Open(
            request, left=request.num_samples
        )

    def idle(self, seconds: float) -> None:
        """Count time in which nothing ran."""
        self.report.seconds += seconds

    def step(
        self,
        began: float,
        seconds: float,
        batch: Batch,
        usage: Usage,
        outputs: list[TokenOutput],
    ) -> None:
        """Count a step.

        Args:
            began: when it began, on the clock of the arrivals.
            seconds: how long it took.
            batch: what it computed.
            usage: of the memory, while it was computed.
            outputs: what it produced.
        """
        report, ended = self.report, began + seconds
        report.steps += 1
        report.seconds += seconds
        report.busy_seconds += seconds
        report.batch_seconds += len(batch.entries) * seconds
        report.computed_tokens += batch.num_tokens
        for i, slots in enumerate(usage):
            report.slot_seconds[i] += slots * seconds
        for request in batch.admitted:
            report.queueing.add(began - request.arrival)
        gaps: Counter[float] = Counter()
        for output in outputs:
            self._output(output, ended, gaps)
        for gap, count in gaps.items():
            report.inter_token.add(gap, count)

    def _output(
        self, output: TokenOutput, now: float, gaps: Counter[float]
    ) -> None:
        known = self._open.get(output.request_id)
        if known is None:
            raise ValueError(
                f"request {output.request_id!r} is not one of the replay's"
            )
        if output.token_id is not None:
            self.report.output_tokens += 1
            last = known.last.get(output.sample)
            if last is not None:
                gaps[now - last] += 1
                known.gaps += now - last
                known.num_gaps += 1
            elif known.first is None:
                known.first = now
                self.report.ttft.add(now - known.request.arrival)
            known.last[output.sample] = now
        if output.finished:
            self._finished(output, known, now)

    def _finished(self, output: TokenOutput, known: _Open, now: float) -> None:
        known.left -= 1
        known.failed = known.failed or output.reason == "error"
        if known.left > 0:
            return
        del self._open[output.request_id]
        if known.failed:
            self.report.failed += 1
            return
        self.report.requests += 1
        self.report.latency.add(now - known.request.arrival)
        self.report.good += self._is_good(known)

    def _is_good(self, known: _Open) -> bool:
        slo = self.report.slo
        if slo is None or known.first is None:
            return False
        gap = known.gaps / known.num_gaps if known.num_gaps else 0.0
        in_time = known.first - known.request.arrival <= slo.ttft
        return in_time and gap <= slo.inter_token
