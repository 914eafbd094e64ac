def requests_that_fit(
    gpu_bytes: int,
    utilisation: float,
    weight_bytes: int,
    token_bytes: int,
    block_size: int,
    length: int,
) -> int:
    """Return the requests of this length that fit at once."""
    free = max(int(gpu_bytes * utilisation) - weight_bytes, 0)
    blocks = free // (token_bytes * block_size)
    blocks_each = -(-length // block_size)
    return blocks // blocks_each
