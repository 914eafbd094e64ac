def idle_seats(outputs: list[int], seats: int) -> int:
    """Return the seat-steps of a static server without a token."""
    steps = 0
    for first in range(0, len(outputs), seats):
        steps += max(outputs[first : first + seats])
    return seats * steps - sum(outputs)
