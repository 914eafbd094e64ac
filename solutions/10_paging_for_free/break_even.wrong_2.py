def break_even(
    seats: int, regions: tuple[int, int], paged: tuple[int, int]
) -> int | None:
    """Return the smallest paged batch that is no slower."""
    fixed, each = paged
    # b / (fixed + b * each) >= seats / took, without a division.
    took = regions[0] + seats * regions[1]
    gained = took - seats * each  # per sequence of the batch
    if gained <= 0:
        return None
    return seats * fixed // gained
