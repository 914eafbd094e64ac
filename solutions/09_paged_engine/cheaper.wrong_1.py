# ruff: noqa: F821
class Costs(NamedTuple):
    """What was measured, in seconds and bytes."""

    per_token: float
    per_copy: float
    copies_per_block: int
    bytes_per_token: int
    bytes_per_second: float


def cheaper(num_tokens: int, block_size: int, costs: Costs) -> str:
    """Wrong: the cache goes out and never comes back."""
    blocks = -(-num_tokens // block_size)
    copies = blocks * costs.copies_per_block
    moved = blocks * block_size * costs.bytes_per_token
    swap = copies * costs.per_copy + moved / costs.bytes_per_second
    recompute = num_tokens * costs.per_token
    return "swap" if swap < recompute else "recompute"
