"""What a reader sees: each function draws what it is given, one figure."""

from llm_systems_cookbook.plots.pool import (
    bars,
    block_tables,
    lines,
    pool_grid,
    program_grid,
    refcounts,
    split_bars,
    used_and_wasted,
    waste_by_block_size,
)
from llm_systems_cookbook.plots.serving import (
    Span,
    latency_against_load,
    merge_spans,
    occupancy_lines,
    pool_over_time,
    timeline,
)
from llm_systems_cookbook.plots.style import (
    FREE,
    INK,
    LIVE,
    SHARED,
    WASTE,
    WASTE_DARK,
    WASTE_LIGHT,
    note,
)

__all__ = [
    "FREE",
    "INK",
    "LIVE",
    "SHARED",
    "WASTE",
    "WASTE_DARK",
    "WASTE_LIGHT",
    "Span",
    "bars",
    "block_tables",
    "latency_against_load",
    "lines",
    "merge_spans",
    "note",
    "occupancy_lines",
    "pool_grid",
    "pool_over_time",
    "program_grid",
    "refcounts",
    "split_bars",
    "timeline",
    "used_and_wasted",
    "waste_by_block_size",
]
