# ruff: noqa: F821
def tree_of_depth_two(
    pool: Pool,
    prompt: list[float],
    first: list[list[float]],
    second: list[list[float]],
) -> tuple[list[list[float]], int]:
    """Count while the inner nodes still hold tails that no leaf reads."""
    root = SequenceTable(pool.allocator.block_size)
    pool.write(root, prompt)
    nodes, leaves = [], []
    for one in first:
        node = fork_sequence(root, pool.allocator)
        pool.write(node, one)
        nodes.append(node)
        for two in second:
            leaf = fork_sequence(node, pool.allocator)
            pool.write(leaf, two)
            leaves.append(leaf)
    contents = [pool.read(leaf) for leaf in leaves]
    used = pool.allocator.used_blocks
    for table in [root, *nodes, *leaves]:
        table.free(pool.allocator)
    return contents, used
