def step_bytes(
    lengths: list[int],
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
) -> tuple[int, int]:
    """Gather tokens, where real gathers take whole blocks."""
    token = 2 * num_kv_heads * head_dim * itemsize
    tokens = sum(lengths)
    return tokens * token, 3 * tokens * token
