# ruff: noqa: F821
def cheapest_victims(
    running: dict[str, tuple[int, int]], needed: int
) -> set[str]:
    """Wrong: says that nothing would be free."""
    # Blocks still needed -> the fewest tokens lost, and whose they are.
    best: dict[int, tuple[int, frozenset[str]]] = {needed: (0, frozenset())}
    for name in list(running)[1:]:
        blocks, tokens = running[name]
        for left, (lost, chosen) in list(best.items()):
            rest = max(0, left - blocks)
            option = lost + tokens, chosen | {name}
            if rest not in best or option[0] < best[rest][0]:
                best[rest] = option
    if 0 not in best:
        raise OutOfBlocks(needed=needed, free=0)
    return set(best[0][1])
