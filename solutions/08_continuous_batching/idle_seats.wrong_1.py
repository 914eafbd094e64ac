def idle_seats(outputs: list[int], seats: int) -> int:
    """Forget the empty seats of a smaller last batch."""
    idle = 0
    for first in range(0, len(outputs), seats):
        group = outputs[first : first + seats]
        idle += len(group) * max(group) - sum(group)
    return idle
