# ruff: noqa: F821
def slot_steps(
    memory: str,
    requests: list[tuple[int, int]],
    max_tokens: int,
    block_size: int,
) -> tuple[int, int, int]:
    """Wrong: runs the loop in a pool large enough, and predicts nothing."""
    memories = four_memories(2**16, max_tokens, block_size)
    run = time_weighted(memories[memory], requests)
    return tuple(run.slot_steps[:3])
