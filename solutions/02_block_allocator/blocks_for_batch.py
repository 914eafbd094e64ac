def blocks_for_batch(lengths: list[int], block_size: int) -> int:
    """Return the blocks that sequences of these lengths need together."""
    return sum(-(-length // block_size) for length in lengths)
