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
from pathlib import Path

import torch

from llm_systems_cookbook.attention import gather_loop_attention
from llm_systems_cookbook.models import TinyGPT
from llm_systems_cookbook.nb import Session
from llm_systems_cookbook.serving import Report, Request, replay
from llm_systems_cookbook.tools.bench_engine import (
    BLOCK_SIZE,
    TimedModel,
    contiguous,
    fill,
    paged,
    timed_rounds,
)
from llm_systems_cookbook.workloads import sharegpt

BATCH = 32
MAX_TOKENS = 1024
# What reserve-max sets aside: in both loads about four times the mean length.
LIMITS = {"sharegpt": 2048 // 8, "book": 384}
RESULTS = Path(__file__).parent / "results"


def equal_batches(
    session: Session, mean_prompt: int, rounds: int, steps: int
) -> None:
    """Time decode steps of 32 sequences of different lengths."""
    slots = BATCH * MAX_TOKENS

    def model() -> TimedModel:
        return TimedModel(TinyGPT())

    blocks = slots, BLOCK_SIZE, BATCH
    engines = {
        "contiguous": contiguous(model(), slots, MAX_TOKENS, BATCH),
        "gather_loop": paged(model(), *blocks, gather_loop_attention),
        "in_place": paged(model(), *blocks, "cpu"),
        "one_block": paged(
            model(), slots, MAX_TOKENS, BATCH, "cpu", watermark=0.0
        ),
    }
    for engine in engines.values():
        fill(engine, BATCH, mean_prompt, (rounds + 2) * steps)
    spent = timed_rounds(engines, rounds, steps)
    seconds = {name: [s.step for s in own] for name, own in spent.items()}
    beside = [(s.step - s.forward) / s.forward for s in spent["contiguous"]]
    report_batches(session, mean_prompt, seconds, beside)


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
            paged(TimedModel(model), slots, BLOCK_SIZE, 64, "cpu"),
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
