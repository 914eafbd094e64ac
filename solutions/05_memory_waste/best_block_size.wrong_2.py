# ruff: noqa: F821
def best_block_size(
    mean_length: float, bytes_per_token: float, entry_bytes: float
) -> int:
    """Wrong: rounds down, even to 0."""
    ratio = entry_bytes * (2 * mean_length - 1) / bytes_per_token
    return math.floor(math.sqrt(ratio))
