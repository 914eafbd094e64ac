def best_block_size(
    mean_length: float, bytes_per_token: float, entry_bytes: float
) -> int:
    """Wrong: the nearest integer to the minimum is not always the best."""
    ratio = entry_bytes * (2 * mean_length - 1) / bytes_per_token
    return max(1, round(ratio**0.5))
