def break_even(
    seats: int, regions: tuple[int, int], paged: tuple[int, int]
) -> int | None:
    """Return the smallest paged batch that is no slower."""
    # The price per sequence is left out.
    return -(-seats * paged[0] // regions[0])
