"""What paging costs the engine, and what it gains.

    python benchmarks/engine.py

TinyGPT in float32 on the CPU. Steps of equal batches: contiguous memory read
by SDPA, blocks copied together by the naive gather, blocks read in place by
the numba kernel, and the same kernel with one block per request. Then the same
requests, all at once, on equal memory: reserve-max against paged. They come
from two loads: ShareGPT as the paper describes it, every length an eighth; and
short requests ("book"), prompts of 32 to 96 and outputs of 16 to 48 tokens, in
which both engines spend much of their time on the same prefill. Each round
gives every engine its turn; a figure is the median of the rounds' ratios.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from llm_systems_cookbook.attention import (
    ContiguousKVCache,
    PagedKVCache,
    gather_loop_attention,
)
from llm_systems_cookbook.memory import (
    BlockAllocator,
    FirstFitRegions,
    PagedMemory,
    ReservedMemory,
)
from llm_systems_cookbook.models import TinyGPT
from llm_systems_cookbook.nb import Session
from llm_systems_cookbook.serving import Report, Request, Scheduler, replay
from llm_systems_cookbook.serving.engine import Engine
from llm_systems_cookbook.workloads import sharegpt

BATCH = 32
BLOCK_SIZE = 16
MAX_TOKENS = 1024
# What reserve-max sets aside: in both loads about four times the mean length.
LIMITS = {"sharegpt": 2048 // 8, "book": 384}
RESULTS = Path(__file__).parent / "results"


class TimedModel:
    """A model that adds up the seconds of its forward."""

    def __init__(self, model: TinyGPT) -> None:
        self.model = model
        self.seconds = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def __call__(self, *inputs: Tensor | Sequence[int] | Callable) -> Tensor:
        """Compute, and add the time."""
        start = time.perf_counter()
        logits = self.model(*inputs)
        self.seconds += time.perf_counter() - start
        return logits


def contiguous(
    model: TimedModel, num_slots: int, max_tokens: int, max_num_seqs: int
) -> Engine:
    memory = ReservedMemory(num_slots, max_tokens, regions=FirstFitRegions)
    cache = ContiguousKVCache(
        model.num_layers, num_slots, model.num_kv_heads, model.head_dim
    )
    return Engine(model, _scheduler(memory, max_num_seqs), cache)


def paged(
    model: TimedModel,
    num_slots: int,
    block_size: int,
    max_num_seqs: int,
    backend: object = "cpu",
    watermark: float = 0.01,
) -> Engine:
    num_blocks = num_slots // block_size
    memory = PagedMemory(BlockAllocator(num_blocks, block_size))
    cache = PagedKVCache(
        model.num_layers,
        num_blocks,
        block_size,
        model.num_kv_heads,
        model.head_dim,
    )
    scheduler = _scheduler(memory, max_num_seqs, watermark)
    return Engine(model, scheduler, cache, backend)


def _scheduler(
    memory: ReservedMemory | PagedMemory,
    max_num_seqs: int,
    watermark: float = 0.01,
) -> Scheduler:
    return Scheduler(
        memory,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        watermark=watermark,
    )


def equal_batches(
    session: Session, mean_prompt: int, rounds: int, steps: int
) -> None:
    """Time decode steps of 32 sequences of different lengths."""
    slots = BATCH * MAX_TOKENS
    models = {
        name: TimedModel(TinyGPT())
        for name in ("contiguous", "gather_loop", "in_place", "one_block")
    }
    engines = {
        "contiguous": contiguous(
            models["contiguous"], slots, MAX_TOKENS, BATCH
        ),
        "gather_loop": paged(
            models["gather_loop"],
            slots,
            BLOCK_SIZE,
            BATCH,
            gather_loop_attention,
        ),
        "in_place": paged(models["in_place"], slots, BLOCK_SIZE, BATCH),
        "one_block": paged(
            models["one_block"], slots, MAX_TOKENS, BATCH, watermark=0.0
        ),
    }
    for engine in engines.values():
        fill(engine, mean_prompt, (rounds + 2) * steps)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    beside: list[float] = []
    for round_number in range(rounds + 1):
        for name, engine in engines.items():
            time.sleep(0.05)  # let the last library's threads fall asleep
            spent, model = timed_steps(engine, models[name], steps)
            if round_number == 0:
                continue  # warms up
            seconds[name].append(spent)
            if name == "contiguous":
                beside.append((spent - model) / model)
    report_batches(session, mean_prompt, seconds, beside)


def fill(engine: Engine, mean_prompt: int, outputs: int) -> None:
    """Add a full batch, and step until all of it decodes."""
    rng = random.Random(mean_prompt)
    for _ in range(BATCH):
        length = rng.randint(mean_prompt // 2, 3 * mean_prompt // 2)
        engine.add_request(rng.choices(range(256), k=length), outputs + 99)
    while len(engine.scheduler.running) < BATCH:
        engine.step()
    engine.step()
    engine.step()
    assert all(e.num_tokens == 1 for e in engine.last_batch.entries)
    assert len(engine.last_batch.entries) == BATCH


def timed_steps(
    engine: Engine, model: TimedModel, steps: int
) -> tuple[float, float]:
    """Return the median seconds of a step, and of its forward."""
    step_seconds, forward_seconds = [], []
    for _ in range(steps):
        model.seconds = 0.0
        engine.step()
        step_seconds.append(engine.step_seconds)
        forward_seconds.append(model.seconds)
    return (
        statistics.median(step_seconds),
        statistics.median(forward_seconds),
    )


def report_batches(
    session: Session,
    mean_prompt: int,
    seconds: dict[str, list[float]],
    beside: list[float],
) -> None:
    context = {
        "batch": BATCH,
        "mean_prompt": mean_prompt,
        "block_size": BLOCK_SIZE,
        "threads": torch.get_num_threads(),
    }
    for name, spent in seconds.items():
        ratios = sorted(
            base / own
            for base, own in zip(seconds["contiguous"], spent, strict=True)
        )
        session.measure(
            f"{name}_prompt_{mean_prompt}",
            statistics.median(ratios),
            "x the throughput of contiguous",
            rounds=len(spent),
            lowest=ratios[0],
            highest=ratios[-1],
            milliseconds=statistics.median(spent) * 1e3,
            **context,
        )
        if name == "in_place":
            ratio = statistics.median(ratios)
            session.check(
                f"in_place_not_below_contiguous_prompt_{mean_prompt}",
                lambda ratio=ratio: ratio >= 1,
            )
    share = statistics.median(beside)
    session.measure(
        f"bookkeeping_prompt_{mean_prompt}",
        100 * share,
        "% of the forward on contiguous memory",
        lowest=100 * min(beside),
        highest=100 * max(beside),
        **context,
    )
    session.check(
        f"bookkeeping_below_15_percent_prompt_{mean_prompt}",
        lambda: share < 0.15,
    )


def equal_memory(
    session: Session, load: str, num_requests: int, rounds: int
) -> None:
    """Serve the same requests, all there from the start.

    The pool holds four reservations.
    """
    model, limit = TinyGPT(), LIMITS[load]
    slots = 4 * limit
    reports: list[list[Report]] = []
    for _ in range(rounds):
        engines = (
            contiguous(TimedModel(model), slots, limit, 64),
            paged(TimedModel(model), slots, BLOCK_SIZE, 64),
        )
        reports.append(
            [
                replay(engine, saturating_requests(load, num_requests))
                for engine in engines
            ]
        )
    ratios = sorted(b.throughput / a.throughput for a, b in reports)
    reserved, in_place = reports[0]
    session.measure(
        f"paged_at_equal_memory_{load}",
        statistics.median(ratios),
        "x the throughput of reserve-max",
        rounds=rounds,
        lowest=ratios[0],
        highest=ratios[-1],
        slots=slots,
        max_tokens=limit,
        requests=num_requests,
        batch_reserved=reserved.mean_batch,
        batch_paged=in_place.mean_batch,
        preemptions=in_place.counts.preemptions,
        computed_by_reserved=reserved.computed_tokens,
        computed_by_paged=in_place.computed_tokens,
        output_tokens=in_place.output_tokens,
    )
    session.check(
        f"all_tokens_are_there_{load}",
        lambda: len({r.output_tokens for each in reports for r in each}) == 1,
    )
    if load == "sharegpt":
        session.check(
            "paged_at_least_twice_reserve_max",
            lambda: statistics.median(ratios) >= 2,
        )


def saturating_requests(load: str, count: int) -> list[Request]:
    """Return a load's requests, all of which arrive at once; seed 7."""
    rng = random.Random(7)
    if load == "book":
        lengths = [
            (rng.randint(32, 96), rng.randint(16, 48)) for _ in range(count)
        ]
    else:
        drawn = sharegpt(count, seed=7)
        lengths = [
            (max(1, int(prompt) // 8), max(1, int(output) // 8))
            for prompt, output in zip(
                drawn.input_len, drawn.output_len, strict=True
            )
        ]
    return [
        Request(i, rng.choices(range(256), k=prompt), output)
        for i, (prompt, output) in enumerate(lengths)
    ]


def main(
    rounds: int = 7,
    steps: int = 15,
    num_requests: int = 128,
    to: Path = RESULTS,
) -> None:
    """Measure, print and write the figures."""
    session = Session("engine", to)
    for mean_prompt in (64, 256):
        equal_batches(session, mean_prompt, rounds, steps)
    for load in LIMITS:
        equal_memory(session, load, num_requests, rounds)
    session.save()


if __name__ == "__main__":
    main()
