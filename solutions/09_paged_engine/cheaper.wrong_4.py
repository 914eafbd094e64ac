# ruff: noqa: F821
class Costs(NamedTuple):
    """What was measured, in seconds and bytes."""

    per_token: float
    per_copy: float
    copies_per_block: int
    bytes_per_token: int
    bytes_per_second: float


def cheaper(num_tokens: int, block_size: int, costs: Costs) -> str:
    """Wrong: moves tokens, not whole blocks."""
    blocks = -(-num_tokens // block_size)
    copies = 2 * blocks * costs.copies_per_block
    moved = 2 * num_tokens * costs.bytes_per_token
    swap = copies * costs.per_copy + moved / costs.bytes_per_second
    recompute = num_tokens * costs.per_token
    return "swap" if swap < recompute else "recompute"
