# ruff: noqa: F821
def cheapest_victims(
    running: dict[str, tuple[int, int]], needed: int
) -> set[str]:
    """Wrong: the newest first."""
    younger = list(running)[1:]
    younger.reverse()
    chosen, freed = set(), 0
    for name in younger:
        if freed >= needed:
            break
        chosen.add(name)
        freed += running[name][0]
    if freed < needed:
        raise OutOfBlocks(needed=needed, free=freed)
    return chosen
