def requests_that_fit(
    gpu_bytes: int,
    utilisation: float,
    weight_bytes: int,
    token_bytes: int,
    block_size: int,
    length: int,
) -> int:
    """Let weights that are too large leave a negative number."""
    free = int(gpu_bytes * utilisation) - weight_bytes
    blocks = free // (token_bytes * block_size)
    return blocks // -(-length // block_size)
