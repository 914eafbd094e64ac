# ruff: noqa: F821
def best_block_size(
    mean_length: float, bytes_per_token: float, entry_bytes: float
) -> int:
    """Return the block size at which tail and table cost least together."""
    # Apart from constants, the cost is (token * B + entry * (2L - 1) / B) / 2.
    ratio = entry_bytes * (2 * mean_length - 1) / bytes_per_token
    below = max(1, math.floor(math.sqrt(ratio)))
    # One more costs `token` and saves entry * (2L - 1) / (B * (B + 1)).
    return below + 1 if ratio > below * (below + 1) else below
