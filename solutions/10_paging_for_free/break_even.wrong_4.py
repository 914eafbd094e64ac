# ruff: noqa: F821
def break_even(
    seats: int, regions: tuple[int, int], paged: tuple[int, int]
) -> int | None:
    """Wrong: a quotient of floats, rounded up, may be one too many."""
    gain = regions[0] + seats * regions[1] - seats * paged[1]
    if gain <= 0:
        return None
    return max(1, math.ceil(paged[0] / (gain / seats)))
