def step_bytes(
    lengths: list[int],
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
) -> tuple[int, int]:
    """Round the sum up once, where each sequence rounds up for itself."""
    token = 2 * num_kv_heads * head_dim * itemsize
    tokens = sum(lengths)
    gathered = -(-tokens // block_size) * block_size
    return tokens * token, (2 * gathered + tokens) * token
