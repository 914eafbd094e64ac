# ruff: noqa: F821
def tree_of_depth_two(
    pool: Pool,
    prompt: list[float],
    first: list[list[float]],
    second: list[list[float]],
) -> tuple[list[list[float]], int]:
    """Take blocks of 4, whatever the pool has."""
    root = SequenceTable(4)
    pool.write(root, prompt)
    leaves = grow(pool, grow(pool, [root], first), second)
    contents = [pool.read(leaf) for leaf in leaves]
    used = pool.allocator.used_blocks
    for leaf in leaves:
        leaf.free(pool.allocator)
    return contents, used


def grow(
    pool: Pool, parents: list[SequenceTable], thoughts: list[list[float]]
) -> list[SequenceTable]:
    """Continue each parent with each thought, and free the parents."""
    children = []
    for parent in parents:
        for thought in thoughts:
            child = fork_sequence(parent, pool.allocator)
            pool.write(child, thought)
            children.append(child)
        parent.free(pool.allocator)
    return children
