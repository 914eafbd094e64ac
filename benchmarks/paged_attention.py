"""What reading blocks in place costs, against contiguous SDPA.

    COOKBOOK_TRACES=folder python benchmarks/paged_attention.py

Decode on the CPU: float32, 16 sequences, 32 query and 8 KV heads, blocks of
16. The figure is the ratio of the two times: the median of the rounds, in each
of which every candidate has its turn, and its fastest call counts. Mixed
lengths are those of 16 requests drawn from the Azure 2023 conversation trace,
each in the middle of its output; there SDPA pads to the longest and masks. The
gather is recorded beside it.

No GPU is measured here. Where there is one:

    cookbook bench attention --device cuda --dtype float16 --batch 64 \\
        --length 4096 --no-mixed
"""

import statistics
from pathlib import Path

import torch

from llm_systems_cookbook.nb import Session
from llm_systems_cookbook.tools import bench

BATCH = 16
LENGTHS = (512, 1024, 2048)
HEAD_DIMS = (64, 128)
NAMES = ("cpu", "gather")
UNIFORM_LIMIT = 1.1
MIXED_LIMIT = 0.7
SEED = 0
RESULTS = Path(__file__).parent / "results"


def main(rounds: int = 5, repeats: int = 15, to: Path = RESULTS) -> None:
    """Measure, print and write the figures."""
    session = Session("paged_attention", to)
    mixed, trace = bench.mixed_lengths(BATCH, SEED)
    cases = {f"{n}_each": (n,) * BATCH for n in LENGTHS} | {"mixed": mixed}
    for head_dim in HEAD_DIMS:
        for case, lengths in cases.items():
            context = {"threads": torch.get_num_threads(), "seed": SEED}
            if case == "mixed":
                context |= {
                    "trace": trace.label,
                    "sha256": trace.sha256,
                    "shortest": min(lengths),
                    "mean": statistics.mean(lengths),
                    "longest": max(lengths),
                }
            shape = bench.Shape(lengths, head_dim=head_dim)
            record(session, case, shape, context, rounds, repeats)
    session.save()


def record(
    session: Session,
    case: str,
    shape: bench.Shape,
    context: dict[str, object],
    rounds: int,
    repeats: int,
) -> None:
    """Measure one shape; check the in-place ratio against its limit."""
    limit = MIXED_LIMIT if case == "mixed" else UNIFORM_LIMIT
    name = f"{case}_dim_{shape.head_dim}"
    timings = bench.measure(shape, NAMES, rounds=rounds, repeats=repeats)
    for timing in timings:
        ratio = statistics.median(timing.ratios)
        session.measure(
            f"{timing.name}_{name}",
            ratio,
            "x the time of contiguous SDPA",
            **bench.context_of(timing),
            **context,
        )
        if timing.name == "cpu":
            session.check(
                f"in_place_at_most_{limit}x_{name}",
                lambda ratio=ratio, limit=limit: ratio <= limit,
            )


if __name__ == "__main__":
    main()
