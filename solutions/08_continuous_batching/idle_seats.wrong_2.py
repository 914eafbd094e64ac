def idle_seats(outputs: list[int], seats: int) -> int:
    """Sort the requests first, as no queue does."""
    steps, ordered = 0, sorted(outputs)
    for first in range(0, len(ordered), seats):
        steps += max(ordered[first : first + seats])
    return seats * steps - sum(ordered)
