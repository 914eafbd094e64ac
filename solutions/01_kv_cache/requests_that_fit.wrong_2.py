def requests_that_fit(
    gpu_bytes: int,
    utilisation: float,
    weight_bytes: int,
    token_bytes: int,
    block_size: int,
    length: int,
) -> int:
    """Apply the utilisation to what the weights have left."""
    free = int(max(gpu_bytes - weight_bytes, 0) * utilisation)
    blocks = free // (token_bytes * block_size)
    return blocks // -(-length // block_size)
