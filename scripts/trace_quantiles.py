"""Compute the package's table of quantiles from the traces.

    python scripts/trace_quantiles.py            # write the table
    python scripts/trace_quantiles.py --check    # compare it, write nothing

Fields: `levels` are the quantile levels of every list of quantiles. For each
trace: its source, licence and credit, the SHA-256 of the file, rows, seconds
between the first and the last request, the rank correlation (Spearman) of
input and output length, and for each of both the mean and the quantiles in
tokens.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from llm_systems_cookbook.nb.record import write_atomic
from llm_systems_cookbook.workloads import traces

TABLE = (
    Path(__file__).resolve().parents[1]
    / "llm_systems_cookbook"
    / "workloads"
    / "data"
    / "trace_quantiles.json"
)
# Every 5 %, and closer in the tails, which carry much of the mean.
LEVELS = (
    [0.0, 0.01, 0.025]
    + [round(0.05 * step, 2) for step in range(1, 19)]
    + [0.925, 0.95, 0.975, 0.99, 0.995, 0.9975, 0.999, 0.9995, 1.0]
)
AZURE = {
    "source": "github.com/Azure/AzurePublicDataset",
    "licence": "CC-BY-4.0",
    "credit": "Patel et al., Splitwise, ISCA 2024",
}
MOONCAKE = {
    "source": "github.com/kvcache-ai/Mooncake",
    "licence": "Apache-2.0",
    "credit": "Qin et al., Mooncake, FAST 2025",
}
ORIGIN = {
    "azure-conv-2023": AZURE,
    "azure-code-2023": AZURE,
    "mooncake-conversation": MOONCAKE,
    "mooncake-synthetic": MOONCAKE,
}


def ranks(values: np.ndarray) -> np.ndarray:
    """Return the ranks of `values` [n] from 0; ties share their mean rank."""
    _, inverse, counts = np.unique(
        values, return_inverse=True, return_counts=True
    )
    last = np.cumsum(counts) - 1
    return (last - (counts - 1) / 2)[inverse]


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Return the rank correlation of two samples [n]."""
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def summarise_lengths(lengths: np.ndarray) -> dict[str, Any]:
    """Return mean and quantiles of lengths [n], in tokens.

    Each quantile is a length that occurs in the trace.
    """
    quantiles = np.quantile(lengths, LEVELS, method="inverted_cdf")
    return {
        "mean": round(float(lengths.mean()), 4),
        "quantiles": [int(value) for value in quantiles],
    }


def summarise(trace: traces.Trace) -> dict[str, Any]:
    """Return the table's entry for one trace."""
    return {
        **ORIGIN[trace.name],
        "sha256": trace.sha256,
        "rows": len(trace),
        "duration_s": round(float(trace.arrival_s[-1]), 7),
        "spearman": round(spearman(trace.input_len, trace.output_len), 6),
        "input_len": summarise_lengths(trace.input_len),
        "output_len": summarise_lengths(trace.output_len),
    }


def compute() -> dict[str, Any]:
    """Return the whole table.

    Raises:
        traces.TraceUnavailable: a trace is not here.
    """
    entries = {name: summarise(traces.load(name)) for name in traces.NAMES}
    return {"levels": LEVELS, "traces": entries}


def to_json(table: dict[str, Any]) -> str:
    """Return the table as text, one line for each list."""
    text = json.dumps(table, indent=1, allow_nan=False)
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        if in_list:
            lines[-1] += line.strip().replace(",", ", ")
        else:
            lines.append(line)
        if line.endswith("["):
            in_list = True
        elif line.strip() in ("]", "],"):
            in_list = False
    return "\n".join(line.rstrip() for line in lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Write or check the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="compare, and write nothing"
    )
    check = parser.parse_args(arguments).check
    try:
        text = to_json(compute())
    except (traces.TraceUnavailable, traces.TraceError) as error:
        print(error, file=sys.stderr)
        return 2
    if not check:
        write_atomic(TABLE, text)
        return 0
    if TABLE.read_text("utf-8") == text:
        return 0
    print(f"{TABLE.name} is stale; run {Path(__file__).name}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
