"""Who asks? The requests of public traces, or requests drawn at random."""

from llm_systems_cookbook.workloads.generated import (
    ALPACA_MEAN_INPUT,
    ALPACA_MEAN_OUTPUT,
    MAX_TOKENS,
    SHAREGPT_MEAN_INPUT,
    SHAREGPT_MEAN_OUTPUT,
    Workload,
    alpaca,
    gamma_with_mean,
    lognormal_lengths,
    lognormal_with_mean,
    poisson_arrivals,
    sharegpt,
)
from llm_systems_cookbook.workloads.traces import (
    NAMES,
    Trace,
    TraceError,
    TraceUnavailable,
    generate,
    load,
    load_or_generate,
)

__all__ = [
    "ALPACA_MEAN_INPUT",
    "ALPACA_MEAN_OUTPUT",
    "MAX_TOKENS",
    "NAMES",
    "SHAREGPT_MEAN_INPUT",
    "SHAREGPT_MEAN_OUTPUT",
    "Trace",
    "TraceError",
    "TraceUnavailable",
    "Workload",
    "alpaca",
    "gamma_with_mean",
    "generate",
    "load",
    "load_or_generate",
    "lognormal_lengths",
    "lognormal_with_mean",
    "poisson_arrivals",
    "sharegpt",
]
