def blocks_for_batch(lengths: list[int], block_size: int) -> int:
    """Round up once: sequences would share their tail blocks."""
    return -(-sum(lengths) // block_size)
