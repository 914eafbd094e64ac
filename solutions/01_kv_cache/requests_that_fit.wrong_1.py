def requests_that_fit(
    gpu_bytes: int,
    utilisation: float,
    weight_bytes: int,
    token_bytes: int,
    block_size: int,
    length: int,
) -> int:
    """Count tokens: a tail block could serve two requests."""
    free = max(int(gpu_bytes * utilisation) - weight_bytes, 0)
    return free // token_bytes // length
