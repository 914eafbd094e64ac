# ruff: noqa: F821
def cheapest_victims(
    running: dict[str, tuple[int, int]], needed: int
) -> set[str]:
    """Wrong: the oldest may go, too."""
    from itertools import combinations

    options = [
        set(chosen)
        for n in range(len(running) + 1)
        for chosen in combinations(running, n)
        if sum(running[name][0] for name in chosen) >= needed
    ]
    if not options:
        raise OutOfBlocks(needed=needed, free=0)
    return min(options, key=lambda c: sum(running[n][1] for n in c))
