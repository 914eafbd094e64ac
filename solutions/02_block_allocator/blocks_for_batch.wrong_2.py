def blocks_for_batch(lengths: list[int], block_size: int) -> int:
    """Always one more: a full block gets an empty one behind it."""
    return sum(length // block_size + 1 for length in lengths)
