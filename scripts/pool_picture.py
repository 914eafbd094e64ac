"""Draw the README's picture of the pool, docs/pool.png, from a real run.

    python scripts/pool_picture.py

Requests come, grow, fork and leave in the package's own allocator and tables;
the picture shows where the blocks are at the end.
"""

from pathlib import Path

from matplotlib.figure import Figure

from llm_systems_cookbook import plots
from llm_systems_cookbook.memory import (
    BlockAllocator,
    SequenceTable,
    fork_sequence,
)

PICTURE = Path(__file__).parent.parent / "docs" / "pool.png"
NUM_BLOCKS = 40
BLOCK_SIZE = 16


def serve() -> tuple[BlockAllocator, dict[str, SequenceTable]]:
    """Run a few requests; return the pool and the tables still in it."""
    allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
    tables = {name: SequenceTable(BLOCK_SIZE) for name in "ABCD"}
    for name, prompt in {"A": 70, "B": 100, "C": 40, "D": 55}.items():
        tables[name].extend(allocator, prompt)
    tables["E"] = fork_sequence(tables["A"], allocator)
    for _ in range(45):
        for table in tables.values():
            table.append(allocator)
    tables.pop("B").free(allocator)
    for _ in range(20):
        for table in tables.values():
            table.append(allocator)
    return allocator, tables


def draw() -> Figure:
    """Draw the pool by owner, with the empty slots of each tail."""
    allocator, tables = serve()
    owners: list[list[str]] = [[] for _ in range(NUM_BLOCKS)]
    filled = [0] * NUM_BLOCKS
    for name, table in sorted(tables.items()):
        for i, block_id in enumerate(table.block_ids):
            owners[block_id].append(name)
            filled[block_id] = min(BLOCK_SIZE, table.length - i * BLOCK_SIZE)
    tokens = sum(filled)
    slots = allocator.used_blocks * BLOCK_SIZE
    return plots.pool_grid(
        owners,
        filled=filled,
        block_size=BLOCK_SIZE,
        columns=10,
        title=f"{len(tables)} sequences, {allocator.used_blocks} blocks: "
        f"{100 * tokens / slots:.0f} % of their slots hold a token",
    )


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    draw().savefig(PICTURE, dpi=120)
    print(f"wrote {PICTURE.relative_to(PICTURE.parent.parent)}")
