def step_bytes(
    lengths: list[int],
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
) -> tuple[int, int]:
    """Let attention read the slots after the last token too."""
    token = 2 * num_kv_heads * head_dim * itemsize
    gathered = sum(-(-n // block_size) * block_size for n in lengths)
    return sum(lengths) * token, 3 * gathered * token
