"""What does a reader see? Pictures that speak the same language everywhere.

Three colours have one meaning each, everywhere: `LIVE` (blue) holds tokens,
`WASTE` (orange, always hatched as an area) is reserved or lost, `SHARED`
(bluish green) has several owners. Light grey is free. Figures are white and
opaque with dark text, so they stay readable on a dark page, and hatches,
labels and lightness carry the meaning without colour.

Each function draws what it is given and returns the `Figure`. It is made by
pyplot, so a notebook shows it at the end of the cell: assign the result
(`fig = pool_grid(…)`), or the notebook shows it twice. No function picks a
matplotlib backend or leaves a changed rcParam behind. An argument is checked
where a wrong one would be drawn without a word.
"""

from llm_systems_cookbook.plots.charts import (
    bars,
    lines,
    split_bars,
    used_and_wasted,
    waste_by_block_size,
)
from llm_systems_cookbook.plots.pool import (
    block_tables,
    pool_grid,
    refcounts,
)
from llm_systems_cookbook.plots.serving import (
    Span,
    latency_against_load,
    merge_spans,
    occupancy_lines,
    pool_over_time,
    timeline,
)
from llm_systems_cookbook.plots.steps import program_grid
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
