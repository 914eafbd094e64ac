def step_bytes(
    lengths: list[int],
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
) -> tuple[int, int]:
    """Return the bytes moved without and with a gather."""
    token = 2 * num_kv_heads * head_dim * itemsize
    tokens = sum(lengths)
    gathered = sum(-(-n // block_size) * block_size for n in lengths)
    return tokens * token, (2 * gathered + tokens) * token
